"""What a soak found, as one JSON object and as tables.

Guarantees: the tables and the object are made from the same values. `ok` needs

- at least one finished request and one fault, and every figure that must be zero to be zero;
- every recovery to be shorter than `RECOVERY_S`, and at least one to have been measured as soon as nodes were killed
  `RECOVERY_DUE_KILLS` times, unless faults from outside were to be less than `RECOVERY_S` apart;
- every pair of a fault and its place (`aims.DUE`) to have been hit, in a soak of `PAIRS_DUE_S` or more with such faults
  `PACE_S` apart or less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pdkv.cli.soak.aims import AT_ANY_TIME, DUE, Pair
from pdkv.node.fault_plan import AT_STAGES
from pdkv.node.stages import Stage

RECOVERY_S = 3.0
"""Within which somebody is answered again after the death of one of two prefill nodes."""
RECOVERY_DUE_KILLS = 40
"""Of ten kills about one leaves a recovery to be measured: half of them are of prefill nodes, few come while all others
are well, and of those some are cut off. Without any after so many, measuring is what is broken."""
PAIRS_DUE_S = 600.0
"""A soak that was to last so long has hit every pair, unless faults were to be further apart than `PACE_S`."""
PACE_S = 5.0
"""Mean seconds between two faults from outside, unless something else is asked for."""
MUST_BE_ZERO = ("wrong_answers", "failed_unnamed", "hung", "leaked_pages", "unclean_exits")


@dataclass
class SoakReport:
    seed: int
    asked_s: float = 0.0
    """How long requests were to be sent."""
    gap_s: float = PACE_S
    """Mean seconds between two faults from outside, as asked for."""
    requests: int = 0
    finished: int = 0
    """With an answer equal to one process's."""
    aborted: int = 0
    """By the client, on purpose."""
    wrong_answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Requests that ended with a named error, by its kind."""
    failed_unnamed: int = 0
    hung: int = 0
    """Requests that had not ended well past their own deadline."""
    leaked_pages: int = 0
    """Pages that are neither free nor cached when nothing runs any more."""
    unclean_exits: int = 0
    """Nodes that did not end by themselves when told to, at the end."""
    kills: int = 0
    stops: int = 0
    restarts: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """From the death of one of two prefill nodes, all others being well and staying so, to the end of the first good
    answer of a request that came after it; or to what cut it off, where that came only after `RECOVERY_S`."""
    recoveries_cut: int = 0
    """Not measured: another fault, or the end, came before an answer, and within `RECOVERY_S`."""
    faults: Counter[Pair] = field(default_factory=Counter)
    """By kind and stage."""
    notes: list[str] = field(default_factory=list)
    """What was wrong, in words, to find it again."""
    elapsed_s: float = 0.0

    @property
    def failed_named(self) -> int:
        return self.failures.total()

    @property
    def max_recovery_s(self) -> float:
        return max(self.recoveries_s, default=0.0)

    @property
    def missing(self) -> list[str]:
        """Pairs that are due and were not hit."""
        return [f"{kind}@{place}" for kind, place in DUE if not self.faults[kind, place]]

    @property
    def _enough_for_all(self) -> bool:
        return self.asked_s >= PAIRS_DUE_S and self.gap_s <= PACE_S

    @property
    def failings(self) -> list[str]:
        """Why it is not ok, in words."""
        unmeasured = not self.recoveries_s and self.kills >= RECOVERY_DUE_KILLS
        found = {
            "no request was answered": not self.finished,
            "no node was killed or stopped": not self.kills + self.stops,
            **{f"{name}: {getattr(self, name)}": getattr(self, name) for name in MUST_BE_ZERO},
            f"a recovery took {self.max_recovery_s:.3f} s or more": self.max_recovery_s >= RECOVERY_S,
            # faster than that, faults leave no time for one
            f"no recovery was measured, cut off: {self.recoveries_cut}": unmeasured and self.gap_s >= RECOVERY_S,
            f"faults never injected: {len(self.missing)}": self.missing and self._enough_for_all,
        }
        return [words for words, failed in found.items() if failed]

    @property
    def ok(self) -> bool:
        return not self.failings

    def cut_off(self, lasted_s: float) -> None:
        """A recovery that was to be measured had lasted so long when something else came, and no answer had."""
        if lasted_s >= RECOVERY_S:
            self.recoveries_s.append(lasted_s)
        else:
            self.recoveries_cut += 1

    def line(self) -> str:
        return (
            f"{self.elapsed_s:.0f} s: {self.requests} requests, {self.finished} right, {self.wrong_answers} wrong,"
            f" {self.failed_named} named failures, {self.kills} kills, {self.restarts} restarts"
        )

    def as_dict(self) -> dict[str, Any]:
        names = ("seed", "requests", "finished", "aborted", "failed_named", *MUST_BE_ZERO, "kills", "stops", "restarts")
        return {
            **{name: getattr(self, name) for name in names},
            "recoveries": len(self.recoveries_s),
            "recoveries_cut": self.recoveries_cut,
            "max_recovery_s": round(self.max_recovery_s, 3),
            "failures": dict(self.failures),
            "faults": {f"{kind}@{stage}": n for (kind, stage), n in sorted(self.faults.items())},
            "missing": self.missing,
            "notes": self.notes,
            "elapsed_s": round(self.elapsed_s, 1),
            "failings": self.failings,
            "ok": self.ok,
        }


def coverage_table(report: SoakReport) -> Table:
    """Fault by stage of a request's life: how often it was injected there."""
    table = Table(box=SIMPLE_HEAD, title="Faults injected, by stage", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for deed in AT_STAGES:
        table.add_column(deed.value)
    for place in (*(stage.value for stage in Stage), AT_ANY_TIME):
        table.add_row(place, *(_times(report, (deed.value, place)) for deed in AT_STAGES))
    return table


def elsewhere_table(report: SoakReport) -> Table:
    """The same of calls and of reads."""
    table = Table("fault", "times", box=SIMPLE_HEAD, title="Faults injected, in calls and reads", title_justify="left")
    at_stages = {*(stage.value for stage in Stage), AT_ANY_TIME}
    pairs = {pair for pair in (*DUE, *report.faults) if pair[1] not in at_stages}
    for kind, place in sorted(pairs, key=lambda pair: pair[::-1]):
        table.add_row(f"{kind}@{place}", _times(report, (kind, place)))
    return table


def _times(report: SoakReport, pair: Pair) -> str:
    return str(report.faults[pair] or ("missing" if pair in DUE else "·"))


def figures_table(report: SoakReport) -> Table:
    table = Table("figure", "value", box=SIMPLE_HEAD)
    for name, value in report.as_dict().items():
        if name not in ("faults", "notes"):
            words = [f"{k} {n}" for k, n in value.items()] if isinstance(value, dict) else value
            table.add_row(name, ", ".join(words) if isinstance(words, list) else str(words))
    for note in report.notes:
        table.add_row("note", Text(note))  # words of a log: nothing in brackets is a style
    return table
