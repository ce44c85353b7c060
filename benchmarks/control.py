"""The control path of a request of a million tokens: everything but the model and the bytes.

    python benchmarks/control.py [--quick] [--json FILE]

A prefill and a decode node, each in a process of its own, serve over gRPC and NIXL as ever; only their pages are tiny
(512 bytes for 64 tokens: 16,384 pages are 8 MiB), and the synthetic engine writes marks where a model would compute. So
what is left is the control path: hashing, match, reservation, planning of reads, messages, posting, proof and account,
commit, release.

CPU is that of the whole process, all threads, per request, from its start until prefill has heard that its lease is
over. Taken off, and shown beside it: the engine's own steps (no model), and what an idle node spends in the same time
(polling, probes). *Not* taken off: digests of the tiny pages, the bytes that CMA copies while a read is posted, gRPC's
and UCX's own threads, the interpreter. The parts come from wrapping the very functions that serve
(`pdkv/cli/bench/control_probe.py`); "rest" is what no part claims.

Exposed time is from the end of the last chunk's engine step to admission at decode: sealing, announcing, reading,
proving and committing that chunk, and prefill's last word.

Growth is measured twice: with chunks of 32,768 tokens, where what a request costs at all is spread over more pages, and
with chunks of 4,096, where work that grew with the pages before a chunk would show.

Memory is what a request makes the resident peak of each process grow by, on nodes that have touched their pools and
served nothing but one page, and how many Python objects more are alive at half of its stages. Two lengths, and so what
a page costs beyond the pool: columns of tokens, hashes and rows, and the messages that carry them.

Guarantees: each figure of time is a median of requests that no cache had seen, all but the first into pages of earlier
ones; the account of each is checked. Sizes take turns on one pair of nodes; other pairs have pages that are scattered
(no two free ones are neighbours, so nothing merges), chunks an eighth as long, and many requests in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.control import as_dict, grown, measured, table  # noqa: E402
from pdkv.cli.bench.control_memory import Growth  # noqa: E402
from pdkv.cli.bench.control_node import Role  # noqa: E402
from pdkv.cli.bench.control_run import Case, Cost  # noqa: E402
from pdkv.cli.bench.report import Check, Report, as_table  # noqa: E402

COMMAND = "python benchmarks/control.py"
CPU_MS = 100.0
EXPOSED_MS = 5.0
GROWTH = 1.2


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
    """The last one is the request that has targets; growth is from the one of 1,024 pages to it."""
    from_tokens: int = 1 << 16
    in_flight: tuple[int, ...] = (1, 4, 16, 64)
    chunk_tokens: int = 32_768
    short_chunk_tokens: int = 4_096
    token_us: float = 0.25
    """So that a chunk's step takes longer than what is left to do for the chunk before."""
    short_token_us: float = 1.0
    repetitions: int = 5


@dataclass(slots=True)
class Found:
    sizes: list[Cost]
    scattered: list[Cost]
    short_chunks: list[Cost]
    in_flight: list[Cost]
    memory: tuple[dict[Role, Growth], dict[Role, Growth]]
    """By the request of `from_tokens`, and by the longest."""


async def measure(sizes: Sizes, console: Console) -> Found:
    longest = [Case(sizes.tokens[-1])]
    chunk, pace, some = sizes.chunk_tokens, sizes.token_us, max(1, sizes.repetitions // 2)
    console.print(f"{len(sizes.tokens)} sizes, in turns …")
    each = await measured([Case(tokens) for tokens in sizes.tokens], chunk, pace, sizes.repetitions)
    console.print("scattered pages …")
    scattered = await measured(longest, chunk, pace, some, scattered=True)
    console.print(f"chunks of {sizes.short_chunk_tokens:,} tokens …")
    two = [Case(sizes.from_tokens), *longest]
    short = await measured(two, sizes.short_chunk_tokens, sizes.short_token_us, some)
    console.print(f"up to {max(sizes.in_flight)} in flight …")
    many = await measured([Case(sizes.from_tokens, n) for n in sizes.in_flight], chunk, pace, some)
    console.print("memory …")
    shorter, longer = await grown(two, chunk, pace)
    return Found(each, scattered, short, many, (shorter, longer))


def checks(found: Found, sizes: Sizes) -> list[Check]:
    """The targets."""
    whole = found.sizes[-1]
    base = next(cost for cost in found.sizes if cost.case.tokens == sizes.from_tokens)
    grown = growth(base, whole), growth(*found.short_chunks)
    sides = ", ".join(f"{role} {side.cpu_ms:.1f}" for role, side in whole.sides.items())
    notes = (", ".join(f"{role} {ratio:.2f}" for role, ratio in each.items()) for each in grown)
    return [
        Check("control_1m_cpu_ms", whole.cpu_ms, "<=", CPU_MS, COMMAND, f"each side: {sides}"),
        Check(
            "control_1m_exposed_ms",
            whole.exposed_ms,
            "<=",
            EXPOSED_MS,
            COMMAND,
            f"{whole.after_sealing_ms:.2f} of them after sealing",
        ),
        Check(
            "cost_per_page_growth",
            max(ratio for each in grown for ratio in each.values()),
            "<=",
            GROWTH,
            COMMAND,
            f"CPU a page, {whole.case.pages:,} pages / {base.case.pages:,}: {next(notes)}; short chunks: {next(notes)}",
        ),
    ]


def growth(base: Cost, whole: Cost) -> dict[str, float]:
    """CPU a page of the longer request over that of the shorter one, by side."""
    share = base.case.pages / whole.case.pages
    return {role: side.cpu_ms * share / base.sides[role].cpu_ms for role, side in whole.sides.items()}


def memory(found: Found, sizes: Sizes) -> dict[Role, dict[str, float]]:
    """By side: growth of either request, and of each page that the longer one has more."""
    shorter, longer = (Case(tokens).pages for tokens in (sizes.from_tokens, sizes.tokens[-1]))
    rows: dict[Role, dict[str, float]] = {}
    for role, whole in found.memory[1].items():
        base = found.memory[0][role]
        bytes_a_page, objects_a_page = whole.a_page(base, longer - shorter)
        rows[role] = {
            "shorter_bytes": base.resident_bytes,
            "longer_bytes": whole.resident_bytes,
            "bytes_a_page": bytes_a_page,
            "objects_a_page": objects_a_page,
        }
    return rows


def memory_table(found: Found, sizes: Sizes) -> Table:
    shown = Table(box=SIMPLE_HEAD, title="Growth of the resident peak beyond the pool")
    two = (f"{Case(tokens).pages:,} pages, MB" for tokens in (sizes.from_tokens, sizes.tokens[-1]))
    for heading in ("", *two, "bytes a page", "Python objects a page"):
        shown.add_column(heading, justify="right")
    for role, row in memory(found, sizes).items():
        megabytes = (f"{row[name] / 1e6:.1f}" for name in ("shorter_bytes", "longer_bytes"))
        shown.add_row(role, *megabytes, f"{row['bytes_a_page']:.0f}", f"{row['objects_a_page']:.3f}")
    return shown


def overview(found: Found) -> Table:
    """A row a case."""
    shown = Table(box=SIMPLE_HEAD, title="CPU of a request, engine's steps and idle polling taken off")
    for heading in ("tokens", "pages", "in flight", "", "prefill ms", "decode ms", "µs a page", "exposed ms"):
        shown.add_column(heading, justify="right")
    for words, costs in (
        ("", found.sizes),
        ("scattered pages", found.scattered),
        ("short chunks", found.short_chunks),
        ("", found.in_flight),
    ):
        for cost in costs:
            exposed = f"{cost.exposed_ms:.2f}" if cost.case.in_flight == 1 else "-"
            shown.add_row(
                f"{cost.case.tokens:,}",
                f"{cost.case.pages:,}",
                str(cost.case.in_flight),
                words,
                *(f"{side.cpu_ms:.2f}" for side in cost.sides.values()),
                f"{cost.us_per_page:.2f}",
                exposed,
            )
    return shown


def figures(found: Found, sizes: Sizes) -> dict[str, Any]:
    return {
        "chunk_tokens": sizes.chunk_tokens,
        "short_chunk_tokens": sizes.short_chunk_tokens,
        "token_us": sizes.token_us,
        "short_token_us": sizes.short_token_us,
        "repetitions": sizes.repetitions,
        "sizes": [as_dict(cost) for cost in found.sizes],
        "scattered": [as_dict(cost) for cost in found.scattered],
        "short_chunks": [as_dict(cost) for cost in found.short_chunks],
        "in_flight": [as_dict(cost) for cost in found.in_flight],
        "memory": memory(found, sizes),
    }


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    options = parser.parse_args(arguments)
    sizes = sizes or (Sizes(repetitions=3) if options.quick else Sizes())
    console, began = Console(), time.monotonic()
    found = asyncio.run(measure(sizes, console))
    report = Report("control", COMMAND, checks(found, sizes), figures(found, sizes))
    report.elapsed_s = time.monotonic() - began
    console.print(table(found.sizes[-1]), overview(found), memory_table(found, sizes), as_table(report.checks))
    if options.json is not None:
        report.write(options.json)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
