"""Says which stage of the control path a process spends its time on, by wrapping the functions that do the work.

Guarantees: what is timed is the code that serves, called as it is always called; a part's time is its own, without
that of a part that it calls; a function that isn't there any more is an error, not a part of 0 ms. A process that
doesn't `attach` pays nothing: there is no hook in the code itself. To be attached before a node is built, and for the
process's whole life.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from time import monotonic, thread_time
from typing import Any, NamedTuple

from pdkv.errors import ConfigError


class Part(StrEnum):
    """Of the control path, in the order of a request's life."""

    MESSAGES = "messages"
    """Built, checked, serialised, parsed; gRPC's own work is not in it."""
    HASHING = "hashing"
    """And what else follows from the tokens alone: tail hash, account."""
    MATCH = "match"
    RESERVATION = "reservation"
    ENGINE = "engine"
    """No part of the control path: what stands in a model's place."""
    DIGESTS = "digests"
    """Of the bytes of pages: one call of xxh3 a page and cache."""
    COMMIT = "commit"
    ANNOUNCED = "announcement"
    """Checked against this node's own chain, read order made."""
    PLANNING = "planning"
    """Of reads: cut, indices of pages and rows."""
    POSTING = "posting"
    """Of reads; over CMA the bytes of tiny pages are copied in it, too."""
    ROWS = "rows"
    """Page-table rows that came back, compared."""
    ACCOUNT = "account"
    RELEASE = "release"


class Seam(NamedTuple):
    part: Part
    where: str
    """module:attribute, as it is looked up when it is called."""


_CONVERT = "pdkv.rpc.convert"
SEAMS: tuple[Seam, ...] = (
    *(
        Seam(Part.MESSAGES, f"{_CONVERT}.{module}:{message}_{way}")
        for module, message in (("generate", "generate_request"), ("generate", "generate_event"))
        for way in ("to_pb", "from_pb")
    ),
    *(
        Seam(Part.MESSAGES, f"{_CONVERT}.prefill:{message}_{way}")
        for message in ("prefill_request", "prefill_event", "lease_call")
        for way in ("to_pb", "from_pb")
    ),
    *(
        Seam(Part.MESSAGES, f"pdkv.v1.{message}.{way}")
        for message in (
            "decode_pb2:GenerateRequest",
            "decode_pb2:GenerateEvent",
            "prefill_pb2:PrefillRequest",
            "prefill_pb2:PrefillEvent",
            "prefill_pb2:LeaseCall",
            "prefill_pb2:LeaseReply",
        )
        for way in ("SerializeToString", "FromString", "ByteSize")
    ),
    Seam(Part.MESSAGES, "pdkv.kvcache.manager:CacheManager.generations"),
    Seam(Part.MESSAGES, "pdkv.kvcache.manager:CacheManager.digests"),
    Seam(Part.HASHING, "pdkv.node.prefill:plan_prompt"),
    Seam(Part.HASHING, "pdkv.node.decode:plan_prompt"),
    Seam(Part.MATCH, "pdkv.kvcache.radix_tree:RadixTree.match"),
    Seam(Part.RESERVATION, "pdkv.kvcache.manager:CacheManager.reserve"),
    Seam(Part.ENGINE, "pdkv.adapters.synthetic.engine:SyntheticEngine.forward"),
    Seam(Part.DIGESTS, "pdkv.kvcache.verifier:Verifier.seal"),
    Seam(Part.DIGESTS, "pdkv.kvcache.verifier:Verifier.verify"),
    Seam(Part.DIGESTS, "pdkv.kvcache.verifier:WatchedArrival._look"),
    Seam(Part.COMMIT, "pdkv.kvcache.manager:CacheManager.commit"),
    Seam(Part.ANNOUNCED, "pdkv.node.intake:Intake.announce"),
    Seam(Part.PLANNING, "pdkv.transfer.core:TransferCore.read"),
    Seam(Part.PLANNING, "pdkv.transfer.tasks:OrderTask.next"),
    Seam(Part.POSTING, "pdkv.transfer.backends.nixl:NixlBackend.post"),
    Seam(Part.ROWS, "pdkv.transfer.landing:LandingRows.stale"),
    Seam(Part.ACCOUNT, "pdkv.node.prefill:account_of"),
    Seam(Part.ACCOUNT, "pdkv.node.pull:require_end"),
    Seam(Part.ACCOUNT, "pdkv.node.pull:require_admissible"),
    Seam(Part.RELEASE, "pdkv.kvcache.manager:CacheManager.hand_over"),
    Seam(Part.RELEASE, "pdkv.kvcache.manager:CacheManager.drop_lease"),
    Seam(Part.RELEASE, "pdkv.kvcache.manager:CacheManager.end"),
)


class Span(NamedTuple):
    """A stretch of time that one thread spent on one part. Seconds; points on this machine's monotonic clock."""

    part: Part
    began_s: float
    ended_s: float
    cpu_s: float
    first: bool
    """The call began with it; the others go on after a call that was a part of its own."""


class _Thread(threading.local):
    """Parts that are running in this thread, the innermost last, and since when the last one is."""

    def __init__(self) -> None:
        self.running: list[Part] = []
        self.first = False
        self.since_s = 0.0
        self.since_cpu_s = 0.0

    def began(self) -> None:
        self.since_s, self.since_cpu_s = monotonic(), thread_time()


class Probe:
    """Collects the spans of all threads of a process."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._spans: list[tuple[Part, float, float, float, bool]] = []

    def attach(self, seams: Iterable[Seam] = SEAMS) -> None:
        """Wrap them. Raises `ConfigError` for one that isn't there."""
        for part, where in seams:
            module, _, path = where.partition(":")
            *above, name = path.split(".")
            try:
                owner: Any = importlib.import_module(module)
                for each in above:
                    owner = getattr(owner, each)
                real = getattr(owner, name)
            except (ImportError, AttributeError) as error:
                raise ConfigError("seam", where, "a function that is there: the path has changed") from error
            timed = self.timed(part, real)
            bound = isinstance(owner, type) and getattr(real, "__self__", None) is not None
            setattr(owner, name, staticmethod(timed) if bound else timed)

    def timed(self, part: Part, real: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is that part's."""

        @functools.wraps(real)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            running = thread.running
            if running:
                self._note(thread)
            running.append(part)
            thread.began()
            thread.first = True
            try:
                return real(*args, **kwargs)
            finally:
                self._note(thread)
                running.pop()
                if running:
                    thread.began()

        return wrapper

    def taken(self) -> list[Span]:
        """Those since the last call."""
        spans, self._spans = self._spans, []
        return [Span(*span) for span in spans]

    def _note(self, thread: _Thread) -> None:
        # a bare tuple here: to make what it is named costs as much as all the rest
        cpu_s = thread_time() - thread.since_cpu_s
        self._spans.append((thread.running[-1], thread.since_s, monotonic(), cpu_s, thread.first))
        thread.first = False
