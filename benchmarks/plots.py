"""Plots of the suite's results, for docs/performance.md.

    python benchmarks/plots.py [--results DIR] [--to DIR]

Guarantees: only what is in the results is drawn, and machine and load stand under each plot. A script that was not run
has no plot, which is said. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "pdkv"  # the same results, the same file
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TO = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance"
OURS, THEIRS = "#2b6cb0", "#a0aec0"
Report = dict[str, Any]


def one_host(report: Report, axes: Axes) -> None:
    """GB/s of pulls and yardsticks, with what they are of raw NIXL."""
    rows = sorted(report["figures"]["one_host"], key=lambda row: row["gb_per_s"])
    names = [row["way"].replace("_", " ") for row in rows]
    colours = [OURS if row["way"].startswith(("pull", "streaming")) else THEIRS for row in rows]
    bars = axes.barh(names, [row["gb_per_s"] for row in rows], color=colours)
    axes.bar_label(bars, [f"{row['ratio']:.2f} of raw NIXL" for row in rows], padding=4)
    axes.set(xlabel="GB/s, 512 scattered pages of 3.45 MB, two processes on one host", xmargin=0.25)


def exposed(report: Report, axes: Axes) -> None:
    """What a request waits for its transfer alone, by chunks."""
    rows = report["figures"]["rows"]
    chunks = [row["chunks"] for row in rows]
    axes.plot(chunks, [row["exposed_fraction"] for row in rows], "o-", color=OURS, label="measured")
    axes.plot(chunks, [1 / c for c in chunks], ":", color=THEIRS, label="1 / chunks: the last one can't hide")
    axes.set(xscale="log", yscale="log", xlabel="chunks of a prompt", ylabel="exposed / whole transfer")
    axes.set_xticks(chunks, [str(c) for c in chunks])
    axes.legend()


def control(report: Report, axes: Axes) -> None:
    """CPU of the control path by size of the request."""
    rows = report["figures"]["sizes"]
    pages = [row["pages"] for row in rows]
    for role, style in (("prefill", "o-"), ("decode", "s-")):
        axes.plot(pages, [row["sides"][role]["cpu_ms"] for row in rows], style, label=role)
    axes.axhline(100, color=THEIRS, linestyle=":", label="target of the largest")
    axes.set(xscale="log", yscale="log", xlabel="pages of 64 tokens", ylabel="CPU ms a request, each side")
    axes.legend()


def short_beside_long(report: Report, axes: Axes) -> None:
    """Pulls of 4 pages by themselves, and beside one of 16,384."""
    figures = report["figures"]["short_beside_long"]
    for name, words, colour in (("alone_s", "alone", THEIRS), ("beside_s", "beside a pull of 16,384 pages", OURS)):
        values = sorted(1e3 * second for second in figures[name])
        axes.plot(
            values, [(i + 1) / len(values) for i in range(len(values))], drawstyle="steps", color=colour, label=words
        )
    axes.set(xlabel="ms of a pull of 4 pages, link of 2 Gbit/s", ylabel="share of pulls", xlim=(0, None))
    axes.legend()


PLOTS: dict[str, tuple[str, Callable[[Report, Axes], None]]] = {
    "one_host": ("transfer", one_host),
    "exposed": ("streaming", exposed),
    "control": ("control", control),
    "short_beside_long": ("link", short_beside_long),
}


def drawn(results: Path, to: Path) -> Iterator[str]:
    """What became of each plot."""
    to.mkdir(parents=True, exist_ok=True)
    for name, (script, draw) in PLOTS.items():
        path = results / f"{script}.json"
        if not path.exists():
            yield f"{name}: no {path.name}"
            continue
        report = json.loads(path.read_text())
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        draw(report, axes)
        machine = report["machine"]
        words = f"{report['command']}; {machine['cores']} cores, {machine['cpu']}; load {machine['load_1m']} at its end"
        figure.supxlabel(words, fontsize=7, color="#718096")
        figure.savefig(to / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        yield f"{name}: {to / name}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    for said in drawn(options.results, options.to):
        print(said)


if __name__ == "__main__":
    main()
