"""How fast the cache is, against its targets and against yardsticks that run in between.

    python benchmarks/cache.py [--json] [--trace FILE] [--worst]

Guarantees: every figure is a median of repetitions that take turns with their yardstick; times are CPU time of one
thread, because nothing here waits; what is measured is checked to do what it should; exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdkv.ids import PageHashes  # noqa: E402
from pdkv.kvcache.manager import CacheManager  # noqa: E402
from pdkv.kvcache.page_hash import chain, extend  # noqa: E402
from pdkv.kvcache.radix_tree import RadixTree  # noqa: E402
from pdkv.kvcache.verifier import Verifier  # noqa: E402
from pdkv.replay.pool import pool_without_bytes  # noqa: E402
from pdkv.replay.run import Replay, ReplaySettings  # noqa: E402
from pdkv.replay.trace import PageNames, TraceRequest, read_trace  # noqa: E402

SLICE = ROOT / "tests" / "replay" / "conversation_300.jsonl"
PAGE_BYTES = 64 * 4
"""Of a page's tokens."""


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int = 1 << 20
    chunk_tokens: int = 32_768
    tree_pages: int = 2_000_000
    node_pages: int = 117
    """New pages a request of the conversation trace: what one node of a real tree holds."""
    prompt_pages: int = 16_384
    evicted_pages: int = 10_000
    repetitions: int = 9


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure; `ratio` is value / yardstick. Without a target it is for information."""

    name: str
    value: float
    unit: str
    target: float | None = None
    yardstick: str = ""
    yardstick_value: float | None = None
    ratio: float | None = None
    max_ratio: float | None = None

    @property
    def ok(self) -> bool:
        within = self.target is None or self.value < self.target
        return within and (self.max_ratio is None or self.ratio is None or self.ratio <= self.max_ratio)


def seconds(run: Callable[[], object]) -> float:
    began = thread_time()
    run()
    return thread_time() - began


def in_turns(repetitions: int, *runs: Callable[[], float]) -> list[float]:
    """Median of each run's answers; they take turns, so that all meet the same machine."""
    answers = [[run() for run in runs] for _ in range(repetitions)]
    return [statistics.median(column) for column in zip(*answers, strict=True)]


def random_hashes(pages: int, seed: int = 0) -> PageHashes:
    """Names of a made-up chain: a tree compares them and never looks into them."""
    return PageHashes(np.random.default_rng(seed).bytes(32 * pages))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- page hashes ------------------------------------------------------------------------------------------------------


def bare_loop(raw: bytes) -> bytes:
    """The same SHA-256 over the same bytes, and nothing else."""
    last, sha256 = b"", hashlib.sha256
    for at in range(0, len(raw), PAGE_BYTES):
        running = sha256(last)
        running.update(raw[at : at + PAGE_BYTES])
        last = running.digest()
    return last


def hash_measures(sizes: Sizes) -> Iterator[Measure]:
    tokens = np.random.default_rng(1).integers(0, 150_000, sizes.tokens + sizes.chunk_tokens, dtype=np.uint32)
    whole, chunk = tokens[: sizes.tokens], tokens[sizes.tokens :]
    hashes = chain(whole)
    last = hashes.at(len(hashes) - 1)
    if bare_loop(whole.tobytes()) != last:
        raise SystemExit("the yardstick hashes something else")
    for name, part, run in (
        (f"hash chain of {sizes.tokens:,} tokens", whole, lambda: chain(whole)),
        (f"hash chain, {sizes.chunk_tokens:,} tokens more", chunk, lambda: extend(last, chunk)),
    ):
        raw = part.tobytes()
        mine, bare = in_turns(
            sizes.repetitions, lambda run=run: seconds(run), lambda raw=raw: seconds(lambda: bare_loop(raw))
        )
        yield Measure(name, mine * 1e3, "ms", None, "bare hashlib loop", bare * 1e3, mine / bare, max_ratio=1.6)


# --- the tree ---------------------------------------------------------------------------------------------------------


def full_tree(sizes: Sizes, node_pages: int) -> RadixTree:
    """Unlocked branches of `node_pages` each, and room for a prompt."""
    tree = RadixTree(sizes.tree_pages + sizes.prompt_pages + 1)
    for number, first in enumerate(range(1, sizes.tree_pages + 1, node_pages)):
        pages = np.arange(first, min(first + node_pages, sizes.tree_pages + 1), dtype=np.int32)
        tree.insert(random_hashes(pages.size, number), pages)
    return tree


def copied(count: int, item_bytes: int) -> Callable[[], float]:
    """Yardstick: the time to copy that much, in items in random order."""
    source = np.zeros((count, item_bytes), np.uint8).view((np.void, item_bytes)).ravel()
    order = np.random.default_rng(2).permutation(count)
    return lambda: seconds(lambda: source[order])


def tree_measures(sizes: Sizes) -> Iterator[Measure]:
    before = resident_bytes()
    tree = full_tree(sizes, sizes.node_pages)
    gigabytes = (resident_bytes() - before) / 1e9
    yield Measure(f"memory of a tree of {sizes.tree_pages:,} pages", gigabytes, "GB", 1.0)
    prompt = random_hashes(sizes.prompt_pages, 1 << 40)
    new = np.arange(sizes.tree_pages + 1, sizes.tree_pages + sizes.prompt_pages + 1, dtype=np.int32)
    known = dict.fromkeys(prompt)

    def insert() -> float:
        """The branch goes away again."""
        took = seconds(lambda: tree.insert(prompt, new))
        remove_branch(tree, prompt)
        return took

    inserted, bytes_copied = in_turns(sizes.repetitions, insert, copied(sizes.prompt_pages, 36))
    name = f"insert of {sizes.prompt_pages:,} new pages"
    yield Measure(
        name, inserted * 1e3, "ms", 10.0, "copy of as many hashes", bytes_copied * 1e3, inserted / bytes_copied
    )
    tree.insert(prompt, new)
    common = sizes.prompt_pages * 2 // 3
    asked = PageHashes(prompt.part(0, common).raw + random_hashes(sizes.prompt_pages - common).raw)
    matched, looked_up = in_turns(
        sizes.repetitions,
        lambda: seconds(lambda: tree.match(asked)),
        lambda: seconds(lambda: [h in known for h in asked]),
    )
    name = f"match of {sizes.prompt_pages:,} pages, two thirds known"
    yield Measure(name, matched * 1e3, "ms", 1.0, "a dict asked for each hash", looked_up * 1e3, matched / looked_up)
    steps = tree.work.nodes + tree.work.probes
    if tree.match(asked).pages.size != common:
        raise SystemExit("the tree has found something else")
    steps = tree.work.nodes + tree.work.probes - steps
    yield Measure("tree steps of that match", steps, "steps", sizes.prompt_pages.bit_length() + 3.0)
    yield evict_measure(tree, sizes, f"eviction of {sizes.evicted_pages:,} pages, {sizes.node_pages} a node", 10.0)


def remove_branch(tree: RadixTree, hashes: PageHashes) -> None:
    """Evict exactly this branch: it is made the one that goes first."""
    node = tree.match(hashes).node
    node.output = True
    tree.lock(node)
    tree.unlock(node)
    tree.evict(len(hashes))


def evict_measure(tree: RadixTree, sizes: Sizes, name: str, target: float | None) -> Measure:
    evicted, ids_copied = in_turns(
        sizes.repetitions, lambda: seconds(lambda: tree.evict(sizes.evicted_pages)), copied(sizes.evicted_pages, 32)
    )
    return Measure(name, evicted * 1e3, "ms", target, "copy of as many hashes", ids_copied * 1e3, evicted / ids_copied)


def worse_trees(sizes: Sizes, node_pages: Sequence[int]) -> Iterator[Measure]:
    """Shorter branches than a trace makes: no target, so that it is known what they cost."""
    for pages in node_pages:
        before = resident_bytes()
        tree = full_tree(sizes, pages)
        yield Measure(f"memory of the tree, {pages} a node", (resident_bytes() - before) / 1e9, "GB")
        yield evict_measure(tree, sizes, f"eviction of {sizes.evicted_pages:,} pages, {pages} a node", None)


# --- the manager ------------------------------------------------------------------------------------------------------


def manager_measures(sizes: Sizes) -> Iterator[Measure]:
    """A prompt committed at once and page by page; then evicted for another one."""
    pool = pool_without_bytes(2 * sizes.prompt_pages)
    manager, verifier = CacheManager(pool), Verifier(pool, "none")
    numbers = iter(range(1 << 20, 1 << 30))

    def commit(run: int) -> float:
        hashes = random_hashes(sizes.prompt_pages, next(numbers))
        reservation = manager.reserve(hashes, len(hashes), max_hit_pages=len(hashes))
        spans = [slice(at, min(at + run, len(hashes))) for at in range(0, len(hashes), run)]
        parts = [
            verifier.seal(reservation.id, s.start, reservation.sequence[s], hashes.part(s.start, s.stop)) for s in spans
        ]
        took = seconds(lambda: [manager.commit(part) for part in parts])
        manager.end(reservation)
        return took

    def reserve() -> float:
        hashes = random_hashes(sizes.prompt_pages, next(numbers))
        began = thread_time()
        reservation = manager.reserve(hashes, len(hashes), max_hit_pages=len(hashes))
        took = thread_time() - began
        manager.end(reservation)
        return took

    at_once, one_by_one, reserved = in_turns(
        sizes.repetitions, lambda: commit(sizes.prompt_pages), lambda: commit(1), reserve
    )
    pages = f"{sizes.prompt_pages:,} pages"
    yield Measure(f"commit of {pages} at once", at_once * 1e3, "ms", 10.0)
    yield Measure(f"commit of {pages} one by one, each", one_by_one / sizes.prompt_pages * 1e6, "µs")
    yield Measure(f"reserve of {pages}, evicting for them", reserved * 1e3, "ms")
    manager.check()


def replay_measures(requests: Sequence[TraceRequest], sizes: Sizes) -> Iterator[Measure]:
    """Real requests, in a pool that holds all and in one that has to evict."""
    pages = sum(-(-(r.input_tokens + r.output_tokens) // 64) for r in requests)
    largest = max(-(-(r.input_tokens + r.output_tokens) // 64) for r in requests)

    def us(pool_pages: int) -> float:
        run = Replay(ReplaySettings(pool_pages))
        for request in requests:
            run.step(request)
        run.check()
        return run.result.us_per_request

    tenth = max(pages // 10, largest)
    repetitions = max(1, min(sizes.repetitions, 20_000 // len(requests)))
    plenty, tight, dict_plenty, dict_tight = in_turns(
        repetitions,
        lambda: us(pages),
        lambda: us(tenth),
        lambda: page_dict_us(requests, pages),
        lambda: page_dict_us(requests, tenth),
    )
    for name, mine, yardstick in (
        (f"replayed request, of {len(requests):,}, pool holds all", plenty, dict_plenty),
        ("replayed request, pool of a tenth of that", tight, dict_tight),
    ):
        yield Measure(name, mine, "µs", 120.0, "a dict of pages", yardstick, mine / yardstick)


def page_dict_us(requests: Sequence[TraceRequest], pages: int) -> float:
    """Yardstick: least recently used pages in one ordered dict, without tree, page table, locks or page numbers."""
    names, known, took = PageNames(64), OrderedDict[bytes, None](), 0.0
    for request in requests:
        wanted = list(names.of(request.blocks, request.input_tokens // 64))
        began = thread_time()
        for name in wanted:
            if name not in known:
                break
        for name in wanted:
            known[name] = None
            known.move_to_end(name)
        while len(known) > pages:
            known.popitem(last=False)
        took += thread_time() - began
    return took / len(requests) * 1e6


# --- together ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def measure(sizes: Sizes, requests: Sequence[TraceRequest], worse: Sequence[int]) -> Iterator[Measure]:
    yield from hash_measures(sizes)
    yield from tree_measures(sizes)
    yield from worse_trees(sizes, worse)
    yield from manager_measures(sizes)
    yield from replay_measures(requests, sizes)


def line(m: Measure) -> str:
    limit = f"< {m.target:g} {m.unit}" if m.target is not None else f"<= {m.max_ratio:g} x" if m.max_ratio else ""
    verdict = ("ok" if m.ok else "MISSED") if limit else ""
    ratio = f"{m.ratio:.2f} x {m.yardstick} ({m.yardstick_value:.3f} {m.unit})" if m.ratio is not None else ""
    return f"{m.name:52}  {m.value:9.3f} {m.unit:5}  {limit:10}  {verdict:6}  {ratio}".rstrip()


def main(args: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--trace", default=str(SLICE), help="requests to replay, in Mooncake's format")
    parser.add_argument("--worst", action="store_true", help="trees of one-page nodes as well: takes minutes")
    given = parser.parse_args(args)
    on, found = machine(), []
    if not given.json:
        print(", ".join(f"{name} {value}" for name, value in on.items()), flush=True)
    for each in measure(sizes or Sizes(), read_trace(given.trace), (16, 1) if given.worst else (16,)):
        found.append(each)
        if not given.json:
            print(line(each), flush=True)
    ok = all(each.ok for each in found)
    if given.json:
        print(json.dumps({"machine": on, "ok": ok, "measures": [{**asdict(m), "ok": m.ok} for m in found]}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
