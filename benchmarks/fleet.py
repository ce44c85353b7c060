"""A real fleet on paper: a request of a million tokens over 8 x 400 Gbit/s, with constants that were measured here.

    python benchmarks/fleet.py [--rails 8] [--gbit 400] [--chunk-tokens 8192] [--results FILE]

Nothing is measured by this script: bytes follow from the model, times from the wire's rate, and what control costs is
read from the results of `make bench`. It says which part limits, and what would have to be true for another to.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.geometry.model_config import load_config, model_shape  # noqa: E402
from pdkv.geometry.page_layout import page_format  # noqa: E402

TOKENS = 1 << 20
WIRE_SHARE = 0.98
"""Of a rail's rate that reads of a page reach: NIXL over one 400 Gbit/s rail is full at 1 MiB a descriptor."""
DIGEST_GB_PER_S = 26.0
"""xxh3_64 on one core, from its cache; a core of `make bench` that has to fetch the page does less."""
HBM_GB_PER_S = 4800.0
"""An H200's: what a digest on the device reads at."""


@dataclass(frozen=True, slots=True)
class Fleet:
    rails: int
    gbit: float
    """10^9 bit/s of each rail."""
    chunk_tokens: int

    @property
    def gb_per_s(self) -> float:
        return self.rails * self.gbit / 8 * WIRE_SHARE


def rows(fleet: Fleet, checks: dict[str, Any]) -> list[tuple[str, str, str]]:
    fmt = page_format(model_shape(load_config("glm-5.3")))
    pages = TOKENS // fmt.page_tokens
    whole_gb = pages * fmt.page_bytes / 1e9
    chunk_gb = fleet.chunk_tokens // fmt.page_tokens * fmt.page_bytes / 1e9
    wire_s, chunk_s = whole_gb / fleet.gb_per_s, chunk_gb / fleet.gb_per_s
    cores = fleet.gb_per_s / DIGEST_GB_PER_S
    found = [
        ("bytes", f"{whole_gb:.2f} GB, {pages:,} pages of {fmt.page_bytes:,} B", "the model's geometry"),
        (
            "wire, all at once",
            f"{1e3 * wire_s:.0f} ms at {fleet.gb_per_s:.0f} GB/s",
            f"{WIRE_SHARE:g} of the rails' rate",
        ),
        (
            "wire, last chunk",
            f"{1e3 * chunk_s:.2f} ms",
            f"{fleet.chunk_tokens:,} tokens: what can't hide behind prefill",
        ),
        ("digest, all of it", f"{whole_gb / DIGEST_GB_PER_S:.1f} core seconds", f"{DIGEST_GB_PER_S:g} GB/s a core"),
        (
            "digest at the wire's rate",
            f"{cores:.0f} cores, or {100 * fleet.gb_per_s / HBM_GB_PER_S:.0f}% of a device's memory bandwidth",
            "why a GPU pool is digested on the device",
        ),
    ]
    for name, what in (
        ("control_1m_cpu_ms", "CPU of control, each side"),
        ("control_1m_exposed_ms", "control after the last chunk"),
    ):
        value = checks.get(name, {}).get("value")
        said = "not measured: make bench" if value is None else f"{value:.3g} ms"
        found.append((what, said, f"{name}, measured on two cores"))
    exposed = checks.get("control_1m_exposed_ms", {}).get("value")
    if exposed is not None:
        total_ms = 1e3 * chunk_s + exposed
        found.append(("exposed", f"{total_ms:.1f} ms", "the last chunk's wire and control; all else hides"))
        found.append(
            (
                "one stream of the same bytes",
                f"{1e3 * (wire_s + chunk_s):.0f} ms",
                "without overlap: send when prefill has ended",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rails", type=int, default=8)
    parser.add_argument("--gbit", type=float, default=400.0, help="of a rail, 10^9 bit/s")
    parser.add_argument("--chunk-tokens", type=int, default=8192, help="of prefill")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "latest.json")
    options = parser.parse_args()
    checks = json.loads(options.results.read_text())["checks"] if options.results.exists() else {}
    table = Table("what", "how much", "from", box=SIMPLE_HEAD)
    for row in rows(Fleet(options.rails, options.gbit, options.chunk_tokens), checks):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
