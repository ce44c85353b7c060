"""What digests cost where pages are copied by the same machine: both live off its memory, and off its caches.

    python benchmarks/memory.py [--pages 128] [--turns 5] [--json FILE]

One process, at most two threads, pages of GLM-5.3 on huge pages; no pdkv but for their size. A page is copied and then
digested: by another thread at once, so many pages behind the copy; or by the thread that copied it. The further behind,
the less of a page is still in the cache that the cores share.

Guarantees: ways took turns, figures are medians of the turns; what was copied was digested to what the source's bytes
give; no target.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import xxhash  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.pair import Nodes  # noqa: E402
from pdkv.cli.bench.report import Report  # noqa: E402

HUGE_BYTES = 2 << 20
BEHIND = (1, 4, 32)


class Ground:
    """Two pools of `pages` pages; page i of one is copied into page i of the other."""

    def __init__(self, pages: int) -> None:
        self.page_bytes = Nodes("glm-5.3").fmt.page_bytes
        self.source, self.sink = self._rows(pages), self._rows(pages)
        rng = np.random.default_rng(1)
        self.source[:] = rng.integers(0, 256, self.page_bytes, np.uint8)
        self.source[:, 0] = np.arange(pages) % 256
        self.due = [xxhash.xxh3_64_intdigest(row) for row in self.source]
        self.order = rng.permutation(pages).tolist()

    def _rows(self, pages: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = mmap.mmap(-1, pages * self.page_bytes + HUGE_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        first = -whole.ctypes.data % HUGE_BYTES
        return whole[first : first + pages * self.page_bytes].reshape(pages, self.page_bytes)

    def copy(self, page: int) -> None:
        """Lets the interpreter go, as a digest does."""
        ctypes.memmove(self.sink[page].ctypes.data, self.source[page].ctypes.data, self.page_bytes)

    def digest(self, page: int) -> None:
        if xxhash.xxh3_64_intdigest(self.sink[page]) != self.due[page]:
            raise SystemExit(f"page {page} was copied wrong")

    def ways(self) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        """Words, and what returns seconds by what was done."""
        yield "copy alone", lambda: {"copy": self._seconds(self.copy)}
        yield "digest alone", lambda: {"digest": self._seconds(self.digest)}
        yield "both at once, all pages apart", lambda: self._at_once(len(self.order))
        for pages in BEHIND:
            yield f"both at once, {pages} behind", lambda pages=pages: self._at_once(pages)  # type: ignore[misc]
        yield "one thread, page by page", self._in_one

    def _seconds(self, step: Callable[[int], None]) -> float:
        began_s = time.perf_counter()
        for page in self.order:
            step(page)
        return time.perf_counter() - began_s

    def _at_once(self, behind: int) -> dict[str, float]:
        """A page is digested once it is the last but `behind` - 1 that was copied; all pages apart: those of before."""
        ready: SimpleQueue[int] = SimpleQueue()
        took: dict[str, float] = {}
        apart = behind == len(self.order)

        def digests() -> None:
            took["digest"] = self._seconds(lambda page: self.digest(page if apart else ready.get()))

        other = threading.Thread(target=digests)
        began_s = time.perf_counter()
        other.start()
        for place, page in enumerate(self.order):
            self.copy(page)
            if place >= behind - 1:
                ready.put(self.order[place - behind + 1])
        took["copy"] = time.perf_counter() - began_s
        for page in self.order[len(self.order) - behind + 1 :]:
            ready.put(page)
        other.join()
        return took

    def _in_one(self) -> dict[str, float]:
        def both(page: int) -> None:
            self.copy(page)
            self.digest(page)

        return {"copy": (took_s := self._seconds(both)), "digest": took_s}


def measured(pages: int, turns: int) -> list[dict[str, Any]]:
    """A row a way: GB/s of both, and of the copy against one that is alone."""
    ground = Ground(pages)
    ways = list(ground.ways())
    for page in ground.order:
        ground.copy(page)
    took: dict[str, list[dict[str, float]]] = {words: [] for words, _ in ways}
    for _ in range(turns):
        for words, way in ways:
            took[words].append(way())
    moved_gb = pages * ground.page_bytes / 1e9
    alone = took[ways[0][0]]
    rows = []
    for words, each in took.items():
        row: dict[str, Any] = {"way": words}
        for name in each[0]:
            row[f"{name}_gb_per_s"] = moved_gb / statistics.median(one[name] for one in each)
        if "copy" in each[0]:
            ratios = [a["copy"] / max(one.values()) for a, one in zip(alone, each, strict=True)]
            row["of_copy_alone"] = statistics.median(ratios)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=128, help="of 3.45 MB, twice")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    if options.pages <= max(BEHIND) or options.turns < 1:
        parser.error(f"at least {max(BEHIND) + 1} pages and one turn")
    report, began_s = Report("memory", "python benchmarks/memory.py"), time.monotonic()
    rows = measured(options.pages, options.turns)
    report.figures["ways"], report.elapsed_s = rows, time.monotonic() - began_s
    table = Table("way", "copied, GB/s", "digested, GB/s", "of copy alone, both done", box=SIMPLE_HEAD)
    for row in rows:
        figures = (row.get(key) for key in ("copy_gb_per_s", "digest_gb_per_s", "of_copy_alone"))
        table.add_row(row["way"], *("" if figure is None else f"{figure:.2f}" for figure in figures))
    Console().print(table)
    if options.json:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
