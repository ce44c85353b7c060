"""A trace through the real cache manager: what it would have found, evicted and refused.

Guarantees: pages, tree, locks and page table are those of a node; only bytes are missing, so digests are. After each
request every page is accounted for, and the manager recounts everything several times a run and at its end, or an
`IntegrityError` ends the run.

Requests come one after the other, each over before the next begins: timestamps are not used, so nothing is ever locked
by another request, and one is refused only if it is larger than the pool. A request reserves its prompt and its output;
its full prompt pages stay in the tree. Its output doesn't: a trace doesn't tell what it would be called. Under the
bigram rule a page's name covers the next token, which the trace has only within a block; across blocks it is taken to
be equal, so that rate is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import thread_time

from pdkv.errors import CapacityError, ConfigError, IntegrityError
from pdkv.ids import PageHashes
from pdkv.kvcache.eagle import EagleRule, recorded_tokens
from pdkv.kvcache.eviction import eviction_order
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.verifier import Verifier
from pdkv.replay.pool import pool_without_bytes
from pdkv.replay.trace import PageNames, TraceRequest

MAX_PAGES = 1 << 26
"""Each takes about 130 bytes of this machine's memory."""
_RECOUNTS = 4
"""In a run, the one at its end among them: each costs the whole pool."""
_TOLD_EVERY = 64


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    pages: int
    """That can be handed out."""
    policy: str = "lru"
    eagle_rule: EagleRule = EagleRule.NONE
    page_tokens: int = 64


@dataclass(slots=True)
class ReplayResult:
    """Counts of one run. Times are CPU time of the cache manager's calls alone: they wait for nothing, and page hashes
    and digests are made by others, before and between them."""

    settings: ReplaySettings
    requests: int = 0
    refused: int = 0
    prompt_pages: int = 0
    """Full pages of all prompts, of refused ones too."""
    hit_pages: int = 0
    evicted_pages: int = 0
    recounts: int = 0
    hits_by_length: dict[int, int] = field(default_factory=dict)
    """Requests by hit pages, in classes by powers of two: 0, 1, 2 to 3, 4 to 7 …, named by their least."""
    seconds: dict[str, float] = field(default_factory=lambda: {"reserve": 0.0, "commit": 0.0, "end": 0.0})
    census: dict[str, int] = field(default_factory=dict)
    """At the end."""

    @property
    def hit_rate(self) -> float:
        """Of full prompt pages."""
        return self.hit_pages / self.prompt_pages if self.prompt_pages else 0.0

    @property
    def us_per_request(self) -> float:
        """Over those that were served."""
        return sum(self.us_by_call.values())

    @property
    def us_by_call(self) -> dict[str, float]:
        served = max(self.requests - self.refused, 1)
        return {name: seconds / served * 1e6 for name, seconds in self.seconds.items()}


class Replay:
    """One run. `step` by `step`, or all at once by `replay`."""

    def __init__(self, settings: ReplaySettings) -> None:
        """Raises `ConfigError` on settings that can't be used."""
        if not 1 <= settings.pages <= MAX_PAGES:
            raise ConfigError("pages", settings.pages, f"1 to {MAX_PAGES}")
        self.result = ReplayResult(settings)
        self._names = PageNames(settings.page_tokens)
        pool = pool_without_bytes(settings.pages, page_tokens=settings.page_tokens)
        self.manager = CacheManager(pool, order=eviction_order(settings.policy))
        self._verifier = Verifier(pool, "none")
        self._clock_s = clock_cost_s()

    def step(self, request: TraceRequest) -> None:
        """Raises `IntegrityError` if a page is lost, or held by two."""
        settings, result = self.result.settings, self.result
        recorded = recorded_tokens(request.input_tokens, settings.eagle_rule, page_tokens=settings.page_tokens)
        names = self._names.of(request.blocks, recorded // settings.page_tokens)
        result.requests += 1
        result.prompt_pages += len(names)
        hit = self._serve(request, names)
        if hit is None:
            result.refused += 1
        else:
            result.hit_pages += hit
            least = 1 << (hit.bit_length() - 1) if hit else 0
            result.hits_by_length[least] = result.hits_by_length.get(least, 0) + 1
        result.evicted_pages = self.manager.evicted_pages
        self._require_nothing_held()

    def check(self) -> None:
        """Recount everything. Raises `IntegrityError`."""
        self.manager.check()
        self.result.recounts += 1
        self.result.census = self.manager.census()

    def _serve(self, request: TraceRequest, names: PageHashes) -> int | None:
        """Pages found, or None if it was refused."""
        manager, page_tokens = self.manager, self.result.settings.page_tokens
        drop = self.result.settings.eagle_rule is EagleRule.DROP_PAGE
        began = thread_time()
        try:
            reservation = manager.reserve(
                names,
                -(-(request.input_tokens + request.output_tokens) // page_tokens),
                max_hit_pages=(request.input_tokens - 1) // page_tokens if drop else len(names),
                drop_pages=1 if drop else 0,
                priority=request.priority,
            )
        except CapacityError:
            return None
        reserved = thread_time()
        first, last = len(reservation.hit), len(names)
        prompt, rest = reservation.sequence[first:last], reservation.sequence[last:]
        verified = self._verifier.seal(reservation.id, first, prompt, names.part(first, last))
        sealed = thread_time()
        if len(verified):
            manager.commit(verified)
        manager.take_private(reservation, rest)
        committed = thread_time()
        manager.end(reservation)
        seconds, clock_s = self.result.seconds, self._clock_s
        seconds["end"] += thread_time() - committed - clock_s
        seconds["commit"] += committed - sealed - clock_s
        seconds["reserve"] += reserved - began - clock_s
        return first

    def _require_nothing_held(self) -> None:
        census = self.manager.census()
        if census["free"] + census["cached"] != census["total"]:
            raise IntegrityError("pages are held, or lost, although no request runs", **census)


def clock_cost_s() -> float:
    """Of reading the clock once, which every measured time includes: a system call, a hundredth of a short request."""
    read = [thread_time() for _ in range(101)]
    return min(after - before for before, after in pairwise(read))


def replay(
    requests: Sequence[TraceRequest],
    settings: ReplaySettings,
    progress: Callable[[int], None] = lambda done: None,
) -> ReplayResult:
    """Now and then `progress` hears how many requests more are done.

    Raises `ConfigError` on settings that can't be used, `IntegrityError` if a page is lost or held by two.
    """
    run = Replay(settings)
    recounts = {len(requests) * part // _RECOUNTS for part in range(1, _RECOUNTS + 1)}
    told = 0
    for number, request in enumerate(requests, 1):
        run.step(request)
        if number in recounts:
            run.check()
        if number - told == _TOLD_EVERY or number == len(requests):
            progress(number - told)
            told = number
    return run.result
