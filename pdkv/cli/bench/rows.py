"""What a case came to: figures of all its repetitions, as text, JSON, CSV and a plot.

Guarantees: all four are made from the same values; a figure that was not measured is null, empty or a dash, never 0;
bytes that were wrong make a row wrong, whatever its speed.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdkv.cli.bench.cases import Case
from pdkv.cli.bench.pulls import Pulled
from pdkv.errors import ConfigError, MissingDependency

PERCENTILES = (50, 90, 99)
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: pulls that ran at once, one a sink."""

    pulled: Sequence[Pulled]
    source_cpu_s: float
    """Of all sources."""
    wrong: int
    """Caches of pages whose bytes are not the source's."""
    connect_s: Sequence[float] = ()
    """Of a cold pull, a connection each."""
    series: bool = False
    """Prompts came one after another."""
    ceiling_gb_per_s: float | None = None
    """Of the raw reading that it took turns with; None: there was none."""

    @property
    def seconds(self) -> float:
        """From the first request to the last page that is in its tree; of a series, as if each took the median."""
        if self.series:
            return statistics.median(self.latencies_s) * len(self.latencies_s)
        return max(p.committed_s for p in self.pulled) - min(p.began_s for p in self.pulled)

    @property
    def latencies_s(self) -> Sequence[float]:
        """Of prompts that were pulled one after another, each; of those at once, until the last."""
        return self.pulled[0].each_s if self.series else (self.seconds,)

    @property
    def pages(self) -> int:
        return sum(p.pages for p in self.pulled)

    def gb_per_s(self, page_bytes: int) -> float:
        """10^9 bytes of full pages a second."""
        return self.pages * page_bytes / self.seconds / 1e9


@dataclass
class Row:
    """All repetitions of a case, and what was measured beside them."""

    case: Case
    main_bytes: int
    """Of a page."""
    index_bytes: int
    lane: str = ""
    samples: list[Sample] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    """Name to GB/s, medians of readings in turns with the samples."""
    link_gbit_per_s: float = 0.0
    source_huge: float | None = None
    """How much of the pool is on huge pages, 0 to 1."""
    sink_huge: float | None = None
    failure: str = ""
    """Why it was broken off: a pull whose bytes were refused."""

    @property
    def wrong(self) -> int:
        return sum(sample.wrong for sample in self.samples) + bool(self.failure)

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes of full pages a second, median; None where nothing was to be pulled."""
        rates = self._rates()
        return statistics.median(rates) if rates and max(rates) > 0 else None

    def of_ceiling(self) -> float | None:
        """Median of the ratios, each to the raw reading of its turn."""
        ratios = [
            rate / sample.ceiling_gb_per_s
            for rate, sample in zip(self._rates(), self.samples, strict=True)
            if sample.ceiling_gb_per_s
        ]
        return statistics.median(ratios) if ratios and max(ratios) > 0 else None

    def of_link(self) -> float | None:
        rate = self.gb_per_s
        return 8 * rate / self.link_gbit_per_s if rate and self.link_gbit_per_s else None

    def facts(self) -> dict[str, Any]:
        """Flat, plain values, in the order of columns."""
        case, pulls = self.case, [p for sample in self.samples for p in sample.pulled]
        latency_ms = [1e3 * s for sample in self.samples for s in sample.latencies_s]
        moved_gb = sum(sample.pages for sample in self.samples) * self.page_bytes / 1e9
        last, each = pulls[-1] if pulls else None, case.series
        return {
            "case": str(case),
            **{name: value for name, value in asdict(case).items() if name != "mode"},
            "mode": case.mode.value,
            "repetitions": len(self.samples),
            "lane": self.lane,
            "gb_per_s": self.gb_per_s,
            "of_ceiling": self.of_ceiling(),
            "of_link": self.of_link(),
            **{f"latency_p{p}_ms": _percentile(latency_ms, p) for p in PERCENTILES},
            **self._stages_ms(pulls),
            "admitted_p50_ms": _percentile([1e3 * (p.admitted_s - p.began_s) / each for p in pulls], 50),
            "connect_p50_ms": _percentile([1e3 * s for sample in self.samples for s in sample.connect_s], 50),
            "post_p50_ms": _percentile([1e3 * p.post_s / each for p in pulls], 50),
            "descriptors_before": last and last.descriptors_before // each,
            "descriptors_after": last and last.shipped.descriptors // each,
            "pages_pulled": last and last.pages // each,
            "pages_hit": last and last.hit_pages // each,
            "bytes_main": last and last.pages * self.main_bytes // each,
            "bytes_index": last and last.pages * self.index_bytes // each,
            "bytes_backend": last and last.shipped.bytes_backend // each,
            "digests_verified": last and last.shipped.digests_verified // each,
            "source_cpu_s_per_gb": sum(s.source_cpu_s for s in self.samples) / moved_gb if moved_gb else None,
            "sink_cpu_s_per_gb": sum(p.cpu_s for p in pulls) / moved_gb if moved_gb else None,
            "source_huge": self.source_huge,
            "sink_huge": self.sink_huge,
            "slowest_of_fastest": self._unfairness(),
            "wrong": self.wrong,
            "failure": self.failure,
            **{f"{name}_gb_per_s": rate for name, rate in self.baselines.items()},
        }

    def _stages_ms(self, pulls: Sequence[Pulled]) -> dict[str, Any]:
        """Medians of the way to the first pages."""
        names = ("accepted", "reading", "arrived")
        times = {name: [1e3 * p.stages_s[name] for p in pulls if name in p.stages_s] for name in names}
        return {f"first_{name}_p50_ms": _percentile(found, 50) for name, found in times.items()}

    @property
    def page_bytes(self) -> int:
        return self.main_bytes + self.index_bytes

    def _rates(self) -> list[float]:
        return [sample.gb_per_s(self.page_bytes) for sample in self.samples]

    def _unfairness(self) -> float | None:
        """Slowest pull over fastest of those that ran at once, median."""
        found = []
        for sample in self.samples:
            each = [s for p in sample.pulled for s in p.each_s]
            if len(each) > 1:
                found.append(max(each) / min(each))
        return statistics.median(found) if found else None


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest value that was measured."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else None


def table(rows: Sequence[Row]) -> Table:
    """A line a row; a column for the link only if its rate is known."""
    linked = any(row.link_gbit_per_s for row in rows)
    shown = Table("case", box=SIMPLE_HEAD, pad_edge=False)
    right = ("GB/s", "of raw", *(["of link"] if linked else []), "p50 ms", "p99", "post", "descriptors", "CPU s/GB")
    for name in right:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("bytes", no_wrap=True)
    for row in rows:
        f = row.facts()
        shown.add_row(
            f["case"],
            _figure(f["gb_per_s"], ".2f"),
            _figure(f["of_ceiling"], ".0%"),
            *([_figure(f["of_link"], ".0%")] if linked else []),
            *(_figure(f[name], ".2f") for name in ("latency_p50_ms", "latency_p99_ms", "post_p50_ms")),
            " > ".join(_figure(f[f"descriptors_{when}"], ",") for when in ("before", "after")),
            " ".join(_figure(f[f"{side}_cpu_s_per_gb"], ".2f") for side in ("source", "sink")),
            f"[bold red]{row.wrong} WRONG[/]" if row.wrong else "[green]right[/]" if row.samples else "",
        )
    return shown


def baseline_table(rows: Sequence[Row], absent: dict[str, str]) -> Table:
    """GB/s of the others, and what pdkv reaches of each."""
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    shown = Table(
        "case", "pdkv", *names, box=SIMPLE_HEAD, pad_edge=False, title="GB/s (pdkv / theirs)", title_justify="left"
    )
    for row in rows:
        rate = row.gb_per_s
        if rate is None or not row.baselines:
            continue
        theirs = [row.baselines.get(name) for name in names]
        shown.add_row(str(row.case), f"{rate:.2f}", *("" if t is None else f"{t:.2f} ({rate / t:.2f})" for t in theirs))
    for name, why in absent.items():
        shown.add_row(f"{name}: not here", why)
    return shown


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a row. Raises `ConfigError` if it can't be written."""
    facts = [row.facts() for row in rows]
    names = list(dict.fromkeys(name for each in facts for name in each))
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows({k: "" if v is None else v for k, v in each.items()} for each in facts)
    except OSError as error:
        raise ConfigError("csv", str(path), f"a file that can be written ({error.strerror})") from error


class Plot:
    """A picture that is to be made."""

    def __init__(self, path: Path) -> None:
        """Raises `MissingDependency` without matplotlib, `ConfigError` if it can't be a picture's path."""
        if path.suffix.lower() not in SUFFIXES or not path.parent.is_dir():
            raise ConfigError("plot", str(path), f"a file in a folder that exists, that ends in {', '.join(SUFFIXES)}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependency("matplotlib", "--plot", extra="plots") from error
        self._path = path
        self._figure = Figure(figsize=(10, 1.5), layout="constrained")

    def draw(self, rows: Sequence[Row], title: str) -> None:
        """A bar a row, and as a line what raw NIXL did. Raises `ConfigError` if the file can't be written."""
        drawn = [row for row in rows if row.gb_per_s is not None]
        self._figure.set_figheight(1.5 + 0.32 * len(drawn))
        axes = self._figure.subplots()
        bars = axes.barh([str(row.case) for row in drawn], [row.gb_per_s or 0.0 for row in drawn], label="pdkv")
        axes.bar_label(bars, fmt="{:.2f}", padding=3)
        ceilings = [s.ceiling_gb_per_s for row in drawn for s in row.samples if s.ceiling_gb_per_s]
        if ceilings:
            axes.axvline(statistics.median(ceilings), color="black", linestyle="--", label="raw NIXL, one descriptor")
        axes.set(title=title, xlabel="GB/s")
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.legend(loc="lower right")
        try:
            self._figure.savefig(self._path, dpi=120)
        except OSError as error:
            raise ConfigError("plot", str(self._path), f"a file that can be written ({error.strerror})") from error


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
