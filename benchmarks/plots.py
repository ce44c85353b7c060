"""Plots of the suite's results, for docs/performance.md.

    python benchmarks/plots.py [--results FILE] [--to DIR]

Guarantees: only what is in the results is drawn, and machine and load stand under each plot. What is not in them has no
plot, which is said; exit code 1 if that is so of all. FILE is the whole suite's, or the report of one script. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "pdkv"  # the same results, the same file
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TO = ROOT / "benchmarks" / "results" / "latest.json", ROOT / "docs" / "performance"
OURS, THEIRS = "#2b6cb0", "#a0aec0"
Report = dict[str, Any]


class NothingToDraw(Exception):
    """Results that hold no figures of any plot; says which were looked for, and the way out."""


def one_host(found: Any, axes: Axes) -> None:
    """GB/s of pulls and yardsticks, with what they are of raw NIXL."""
    rows = sorted(found, key=lambda row: row["gb_per_s"])
    names = [row["way"].replace("_", " ") for row in rows]
    colours = [OURS if row["way"].startswith(("pull", "streaming")) else THEIRS for row in rows]
    bars = axes.barh(names, [row["gb_per_s"] for row in rows], color=colours)
    axes.bar_label(bars, [f"{row['ratio']:.2f} of raw NIXL" for row in rows], padding=4)
    axes.set(xlabel="GB/s, 512 scattered pages of 3.45 MB, two processes on one host", xmargin=0.25)


def exposed(rows: Any, axes: Axes) -> None:
    """What a request waits for its transfer alone, by chunks."""
    chunks = [row["chunks"] for row in rows]
    axes.plot(chunks, [row["exposed_fraction"] for row in rows], "o-", color=OURS, label="measured")
    axes.plot(chunks, [1 / c for c in chunks], ":", color=THEIRS, label="1 / chunks: the last one can't hide")
    axes.set(xscale="log", yscale="log", xlabel="chunks of a prompt", ylabel="exposed / whole transfer")
    axes.set_xticks(chunks, [str(c) for c in chunks])
    axes.legend()


def control(rows: Any, axes: Axes) -> None:
    """CPU of the control path by size of the request."""
    pages = [row["pages"] for row in rows]
    for role, style in (("prefill", "o-"), ("decode", "s-")):
        axes.plot(pages, [row["sides"][role]["cpu_ms"] for row in rows], style, label=role)
    axes.axhline(100, color=THEIRS, linestyle=":", label="target of the largest")
    axes.set(xscale="log", yscale="log", xlabel="pages of 64 tokens", ylabel="CPU ms a request, each side")
    axes.legend()


def short_beside_long(found: Any, axes: Axes) -> None:
    """Pulls of 4 pages by themselves, and beside one of 16,384."""
    for name, words, colour in (("alone_s", "alone", THEIRS), ("beside_s", "beside a pull of 16,384 pages", OURS)):
        values = sorted(1e3 * second for second in found[name])
        axes.plot(
            values, [(i + 1) / len(values) for i in range(len(values))], drawstyle="steps", color=colour, label=words
        )
    axes.set(xlabel="ms of a pull of 4 pages, link of 2 Gbit/s", ylabel="share of pulls", xlim=(0, None))
    axes.legend()


PLOTS: dict[str, tuple[str, str, Callable[[Any, Axes], None]]] = {
    "one_host": ("transfer", "one_host", one_host),
    "exposed": ("streaming", "rows", exposed),
    "control": ("control", "sizes", control),
    "short_beside_long": ("link", "short_beside_long", short_beside_long),
}
"""A plot's name to the script and the figures of it that are drawn."""


def reports_of(results: Path) -> dict[str, Report]:
    """By script. Raises `NothingToDraw` where there is no such file."""
    if not results.exists():
        raise NothingToDraw(f"{results}: no such file; `make bench` writes it")
    held = json.loads(results.read_text())
    return {report["name"]: report for report in held.get("reports", [held])}


def draw_all(results: Path, to: Path) -> list[str]:
    """What became of each plot. Raises `NothingToDraw` if nothing came of any."""
    reports = reports_of(results)
    there = [
        name for name, (script, figures, _) in PLOTS.items() if figures in reports.get(script, {}).get("figures", ())
    ]
    said = [f"{name}: no {PLOTS[name][1]} of {PLOTS[name][0]}.py in {results}" for name in PLOTS if name not in there]
    if not there:
        raise NothingToDraw("; ".join(said) + "; `make bench` writes all of them")
    to.mkdir(parents=True, exist_ok=True)
    for name in there:
        script, figures, draw = PLOTS[name]
        report = reports[script]
        machine = report["machine"]
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        draw(report["figures"][figures], axes)
        words = f"{report['command']}; {machine['cores']} cores, {machine['cpu']}; load {machine['load_1m']} at its end"
        figure.supxlabel(words, fontsize=7, color="#718096")
        figure.savefig(to / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    return said + [f"{name}: {to / name}.svg" for name in there]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--to", type=Path, default=TO, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        for said in draw_all(options.results, options.to):
            print(said)
    except NothingToDraw as error:
        print(f"NothingToDraw: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
