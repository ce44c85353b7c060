"""How much of a transfer a request sees: pulls that overlap with prefill, over a link of a known rate.

    python benchmarks/streaming.py [--quick] [--mbit 1000] [--json FILE]

A prefill node in a network namespace of its own computes a prompt in chunks, with an engine that takes for each the
time that a device would; a decode node at the other end of the shaped link pulls what is announced. A chunk takes the
link 0.8 of its compute. *Exposed* is from prefill's own end to admission, and never less than that: it is the time to
the first token without prefill's, so what decode does before it asks, and the way there, is in it, too.

Guarantees: each row is a median of requests that no cache had seen; the account of each is checked (pages shipped are
the prompt's, all digests verified); the time without a transfer is measured on the same engine, in turns with the rows.
Needs Linux, root, and `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.netns import NotPossible, TwoSpaces  # noqa: E402
from benchmarks.nodes import Asker, node  # noqa: E402
from pdkv.cli.bench.report import Check, Report, as_table  # noqa: E402
from pdkv.geometry.model_config import load_config, model_shape  # noqa: E402
from pdkv.geometry.page_layout import page_format  # noqa: E402
from pdkv.node.messages import Shipment  # noqa: E402

MODEL = "glm-5.3"
PAGES = 64
"""Of a prompt: 221 MB, 1.8 s at 1 Gbit/s."""
LINK_SHARE = 0.8
"""Link time of a chunk / its compute."""
CHUNKS = (1, 4, 8, 16, 32)
CHECKED = 32
PAYLOAD = 0.956
"""Of the rate that `tc` shapes: the rest is headers of Ethernet, IP and TCP, at an MTU of 9000 a little less."""


@dataclass(frozen=True)
class Row:
    """Medians of one number of chunks; seconds."""

    chunks: int
    prefill_s: float
    """From prefill's first step to its last: what a node that computed the prompt for itself would take."""
    transfer_s: float
    exposed_s: float
    """From prefill's end to admission, and all that came before prefill's first step."""
    exposed_fraction: float
    """Of the transfer."""
    ttft_s: float
    ttft_over_alone: float
    requests: int


def row(chunks: int, shipments: Sequence[Shipment]) -> Row:
    median = {
        name: statistics.median(getattr(s, name) for s in shipments) for name in ("prefill_s", "transfer_s", "ttft_s")
    }
    exposed_s = [s.ttft_s - s.prefill_s for s in shipments]
    return Row(
        chunks=chunks,
        prefill_s=median["prefill_s"],
        transfer_s=median["transfer_s"],
        exposed_s=statistics.median(exposed_s),
        exposed_fraction=statistics.median(e / s.transfer_s for e, s in zip(exposed_s, shipments, strict=True)),
        ttft_s=median["ttft_s"],
        ttft_over_alone=statistics.median(s.ttft_s / s.prefill_s for s in shipments),
        requests=len(shipments),
    )


async def measure(spaces: TwoSpaces, chunk_counts: Sequence[int], repetitions: int) -> list[Row]:
    """One prefill node after the other, as a node has one size of chunks; one decode node for all."""
    fmt = page_format(model_shape(load_config(MODEL)))
    link_us = fmt.page_bytes * 8 / (spaces.mbit * PAYLOAD) / fmt.page_tokens
    token_us = link_us / LINK_SHARE
    link = spaces.links[0]
    common = {"model": MODEL, "pool_pages": PAGES * 2 + 8}
    rows = []
    decode_flags = {"bind": f"{link.near_address}:0", "prefill_allow": f"{link.far_address}:*", **common}
    async with node(spaces.near.prefix, "decode", "d", **decode_flags) as decode:
        asker = Asker(fmt.page_tokens)
        try:
            for chunks in chunk_counts:
                flags = {"chunk_tokens": PAGES // chunks * fmt.page_tokens, "synthetic_token_us": token_us, **common}
                bind = f"{link.far_address}:0"
                async with node(spaces.far.prefix, "prefill", f"p{chunks}", bind=bind, **flags) as prefill:
                    await asker.ask(decode, prefill, asker.prompt(1))  # connected, and warm
                    prompts = [asker.prompt(PAGES) for _ in range(repetitions)]
                    rows.append(row(chunks, [await asker.ask(decode, prefill, prompt) for prompt in prompts]))
        finally:
            await asker.close()
    return rows


def show(rows: Sequence[Row]) -> Table:
    table = Table("chunks", "prefill s", "transfer s", "exposed s", "exposed / transfer", "TTFT s", "TTFT / alone")
    for each in rows:
        numbers = (each.prefill_s, each.transfer_s, each.exposed_s, each.exposed_fraction, each.ttft_s)
        table.add_row(str(each.chunks), *(f"{x:.3f}" for x in numbers), f"{each.ttft_over_alone:.3f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {CHECKED} chunks and 1, two requests each")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the link, 10^6 bit/s (default 1000)")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args()
    command_line = "python benchmarks/streaming.py" + (" --quick" if options.quick else "")
    report, console, began = Report("streaming", command_line), Console(), time.monotonic()
    value, note = math.nan, f"(TTFT - prefill) / whole transfer, {CHECKED} chunks, {options.mbit} Mbit/s"
    try:
        with TwoSpaces(mbit=options.mbit, near_here=True) as spaces:
            chunk_counts = (1, CHECKED) if options.quick else CHUNKS
            rows = asyncio.run(measure(spaces, chunk_counts, 2 if options.quick else 3))
    except NotPossible as error:
        note = str(error)
    else:
        value = next(each.exposed_fraction for each in rows if each.chunks == CHECKED)
        report.figures["rows"] = [asdict(each) for each in rows]
        console.print(show(rows))
    report.checks.append(Check("exposed_fraction", value, "<=", 1.5 / CHECKED, command_line, note))
    report.elapsed_s = time.monotonic() - began
    console.print(as_table(report.checks))
    if options.json:
        report.write(options.json)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
