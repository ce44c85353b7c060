"""What routing by prefix is worth: a trace over simulated prefill nodes, by policy.

    python benchmarks/routing.py [--nodes 2,4] [--pages 60000] [--requests 3000] [--speed 1] [--token-us 30]
                                 [--trace FILE] [--json FILE]

The router's own code chooses (`Asking`, `Weights`, `Turns`, loads and trust), and each node has a real cache manager
over a pool without bytes; only computing is simulated: a node computes one prompt after the other, a fixed time a token
and a request, and its pages are in the tree when it is done. Arrivals are the trace's, `--speed` times as fast. `load`
is the same rule without anything that is known of prefixes; *one pool* is one node with the pages of all, which no
routing can beat.

Guarantees: nothing is random, and nothing depends on this machine's speed but the time it takes; every request is
served, or counted as refused.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import lzma
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.report import Report, stamp  # noqa: E402
from pdkv.contract import Contract, ContractFacts, build_contract  # noqa: E402
from pdkv.errors import CapacityError  # noqa: E402
from pdkv.geometry.model_config import load_config, model_shape  # noqa: E402
from pdkv.geometry.page_layout import page_format  # noqa: E402
from pdkv.ids import Incarnation, NodeId, PeerName, RequestId  # noqa: E402
from pdkv.kvcache.manager import CacheManager, Reservation  # noqa: E402
from pdkv.kvcache.verifier import Verifier  # noqa: E402
from pdkv.node.messages import GenerateDone, GenerateRequest, NodeStatus, Sampling, Shipment  # noqa: E402
from pdkv.node.prompt import Prompt, plan_prompt  # noqa: E402
from pdkv.node.routing import Estimate, EstimateCall  # noqa: E402
from pdkv.replay.pool import pool_without_bytes  # noqa: E402
from pdkv.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace  # noqa: E402
from pdkv.router.asking import Asking  # noqa: E402
from pdkv.router.load import Given, computed, given  # noqa: E402
from pdkv.router.pairing import Pairing  # noqa: E402
from pdkv.router.policy import Turns  # noqa: E402
from pdkv.router.registry import Pair, Registry, Role  # noqa: E402
from pdkv.router.weights import REQUEST_TOKENS, Weights  # noqa: E402

TRACE = ROOT / "tests" / "replay" / "conversation_trace.jsonl.xz"
POLICIES = ("round-robin", "load", "prefix")
ONE_POOL = "one pool"
DECODE = "d"
LIFE = Incarnation("0" * 32)


def contract() -> Contract:
    """With room for a token of its own at every place of a trace."""
    shape = model_shape(load_config("tiny"))
    made = build_contract(shape, page_format(shape), identity=ContractFacts("routing"))
    return replace(made, vocab_size=1 << 31)


def request_of(traced: TraceRequest, number: int) -> GenerateRequest:
    """Two prompts have equal tokens as far as their blocks have equal names."""
    blocks = np.array(traced.blocks, np.uint32)[:, None] * BLOCK_TOKENS
    tokens = (blocks + np.arange(BLOCK_TOKENS, dtype=np.uint32)).ravel()[: traced.input_tokens]
    return GenerateRequest(RequestId(f"r{number}"), tokens, Sampling(max_tokens=max(traced.output_tokens, 1)))


@dataclass(slots=True)
class Running:
    """A request on its node, until its prompt is computed."""

    ends_s: float
    number: int
    at_s: float
    prompt: Prompt
    reservation: Reservation
    hit_tokens: int

    def __lt__(self, other: Running) -> bool:
        return (self.ends_s, self.number) < (other.ends_s, other.number)


@dataclass(frozen=True, slots=True)
class Route:
    """How a request got to its node."""

    pair: Pair
    weights: Weights
    counted: AbstractContextManager[Given]
    share: Given


@dataclass
class SimNode:
    """A prefill node whose computing takes simulated time. Its tree is real."""

    address: str
    pages: int
    token_s: float
    clock: Clock
    busy_until_s: float = 0.0
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        pool = pool_without_bytes(self.pages)
        self.manager = CacheManager(pool)
        self._verifier = Verifier(pool, "none")

    async def estimate(self, call: EstimateCall) -> Estimate:
        """As `PrefillNode.estimate`."""
        held = self.manager.tree.match(call.hashes).pages.size
        waiting = int(max(self.busy_until_s - self.clock.now_s, 0.0) / self.token_s)
        return Estimate(PeerName(NodeId(self.address), LIFE), held, waiting, self.manager.tree.evictable)

    def begin(self, number: int, prompt: Prompt) -> Running:
        """Raises `CapacityError` if there are no pages for it now."""
        reservation = self.manager.reserve(prompt.hashes, prompt.pages, max_hit_pages=prompt.prefill_hit_pages)
        hit = len(reservation.hit) * prompt.page_tokens
        left = len(prompt.tokens) - hit
        self.computed_tokens += left
        began_s = max(self.clock.now_s, self.busy_until_s)
        self.busy_until_s = began_s + (left + REQUEST_TOKENS) * self.token_s
        return Running(self.busy_until_s, number, self.clock.now_s, prompt, reservation, hit)

    def end(self, running: Running) -> None:
        """Its pages are cache from now on."""
        reservation, recorded = running.reservation, running.prompt.recorded_pages
        first = len(reservation.hit)
        pages, rest = reservation.sequence[first:recorded], reservation.sequence[recorded:]
        if len(pages):
            hashes = running.prompt.hashes.part(first, recorded)
            self.manager.commit(self._verifier.seal(reservation.id, first, pages, hashes))
        self.manager.take_private(reservation, rest)
        self.manager.end(reservation)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Figures:
    hit_rate: float
    """Of all tokens of prompts."""
    ttft_mean_s: float
    ttft_p95_s: float
    busiest: float
    """Tokens that the busiest node computed, over the mean."""
    refused: int


@dataclass
class Simulation:
    """One policy over so many nodes."""

    policy: str
    nodes: int
    pages: int
    token_s: float
    ttfts_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.contract = contract()
        self.clock = Clock()
        names = [f"p{i}" for i in range(self.nodes)]
        self.sims = {name: SimNode(name, self.pages, self.token_s, self.clock) for name in names}
        self.registry = Registry(names, [DECODE], now=self.clock)
        for node in self.registry:
            pages = {"total": 1 << 30 if node.role is Role.DECODE else self.pages}
            name = PeerName(NodeId(node.address), LIFE)
            said = NodeStatus(name, node.role, pages, 0, 0, "", {}, self.contract, available_pages=pages["total"])
            self.registry.learn(node, said)
        self.turns = Turns(self.registry, Pairing(self.registry))
        self.asking = Asking(self.registry, self, limit_s=60.0)
        self._running: list[Running] = []
        self._routes: dict[int, Route] = {}

    def peer(self, address: str) -> SimNode:
        return self.sims[address]

    decode = peer

    async def run(self, requests: Sequence[tuple[float, GenerateRequest]]) -> Figures:
        for number, (at_s, request) in enumerate(requests):
            self.catch_up(at_s)
            await self.serve(number, request)
        self.catch_up(float("inf"))
        work = [sim.computed_tokens for sim in self.sims.values()]
        ttfts = sorted(self.ttfts_s) or [0.0]
        return Figures(
            self.hit_tokens / max(self.prompt_tokens, 1),
            statistics.fmean(ttfts),
            ttfts[int(0.95 * (len(ttfts) - 1))],
            max(work) / max(statistics.fmean(work), 1.0),
            self.refused,
        )

    async def serve(self, number: int, request: GenerateRequest) -> None:
        prompt = plan_prompt(request.tokens, request.namespace, self.contract)
        self.prompt_tokens += len(request.tokens)
        weights = await self.weights(request)
        full: set[Pair] = set()
        while pair := self.turns.pick(full.__contains__, weights):
            try:
                running = self.sims[pair.prefill.address].begin(number, prompt)
            except CapacityError:
                full.add(pair)
                continue
            used = weights or Weights(request)
            counted = given(used.given(pair), pair.prefill.load, pair.decode.load)
            self._routes[number] = Route(pair, used, counted, counted.__enter__())
            self.hit_tokens += running.hit_tokens
            heapq.heappush(self._running, running)
            return
        self.refused += 1

    async def weights(self, request: GenerateRequest) -> Weights | None:
        if self.policy == "round-robin":
            return None
        weights = await self.asking.weights(request)
        return weights if self.policy == "prefix" else Weights(request)

    def catch_up(self, until_s: float) -> None:
        """Everything that ends by then has ended."""
        while self._running and self._running[0].ends_s <= until_s:
            running = heapq.heappop(self._running)
            self.clock.now_s = running.ends_s
            self.ttfts_s.append(running.ends_s - running.at_s)
            route = self._routes.pop(running.number)
            prefill = route.pair.prefill
            computed(route.share, prefill.load)
            route.counted.__exit__(None, None, None)
            self.sims[prefill.address].end(running)
            shipment = Shipment(prefill_address=prefill.address)
            self.asking.ended(route.pair, route.weights, GenerateDone("length", 1, shipment, (running.hit_tokens,)))
        self.clock.now_s = max(self.clock.now_s, min(until_s, 1e18))


@contextmanager
def readable(trace: Path) -> Iterator[Path]:
    """The trace as text, also where it is compressed."""
    if trace.suffix != ".xz":
        yield trace
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as plain:
        plain.write(lzma.decompress(trace.read_bytes()))
        plain.flush()
        yield Path(plain.name)


def arrivals(trace: Path, limit: int, speed: float) -> list[tuple[float, GenerateRequest]]:
    """Seconds, and what arrives then."""
    with readable(trace) as path:
        traced = read_trace(path, limit=limit)
    return [(each.timestamp_ms / 1e3 / speed, request_of(each, n)) for n, each in enumerate(traced)]


def measure(
    requests: Sequence[tuple[float, GenerateRequest]], nodes: Sequence[int], pages: int, token_s: float
) -> dict[int, dict[str, Figures]]:
    found: dict[int, dict[str, Figures]] = {}
    for count in nodes:
        runs = {policy: Simulation(policy, count, pages, token_s) for policy in POLICIES}
        runs[ONE_POOL] = Simulation("round-robin", 1, count * pages, token_s / count)
        found[count] = {name: asyncio.run(run.run(requests)) for name, run in runs.items()}
    return found


def show(found: dict[int, dict[str, Figures]]) -> Table:
    table = Table("nodes", "policy", "hit rate", "TTFT mean, s", "p95, s", "busiest", "refused", box=SIMPLE_HEAD)
    for count, ways in found.items():
        for at, (way, f) in enumerate(ways.items(), 1):
            cells = (f"{f.hit_rate:.3f}", f"{f.ttft_mean_s:.2f}", f"{f.ttft_p95_s:.2f}", f"{f.busiest:.2f}")
            table.add_row(f"{count}", way, *cells, f"{f.refused}", end_section=at == len(ways))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4", help="prefill nodes, with commas")
    parser.add_argument("--pages", type=int, default=60_000, help="of each node's pool")
    parser.add_argument("--requests", type=int, default=3000, help="the first so many of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster they arrive than in the trace")
    parser.add_argument("--token-us", type=float, default=30.0, help="that a node computes a token")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args()
    console, began = Console(), time.monotonic()
    requests = arrivals(options.trace, options.requests, options.speed)
    found = measure(requests, [*map(int, options.nodes.split(","))], options.pages, options.token_us / 1e6)
    command = (
        f"python benchmarks/routing.py --nodes {options.nodes} --pages {options.pages} --requests {options.requests}"
        f" --speed {options.speed:g} --token-us {options.token_us:g}"
    )
    report = Report("routing", command, elapsed_s=time.monotonic() - began)
    report.figures["nodes"] = {count: {way: asdict(f) for way, f in ways.items()} for count, ways in found.items()}
    console.print(f"{command}: {report.elapsed_s:.0f} s, load {stamp()['load_1m']}", soft_wrap=True)
    console.print(show(found))
    if options.json:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
