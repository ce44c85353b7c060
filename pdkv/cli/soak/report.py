"""What a soak found, as one JSON object and as tables.

Guarantees: `ok` needs at least one finished request and one fault, every figure that must be zero to be zero, and every
recovery to be shorter than `RECOVERY_S`; the tables and the object are made from the same values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pdkv.node.stages import Stage

RECOVERY_S = 3.0
"""Within which somebody is answered again after the death of one of two prefill nodes."""
MUST_BE_ZERO = ("wrong_answers", "failed_unnamed", "hung", "leaked_pages", "unclean_exits")


@dataclass
class SoakReport:
    seed: int
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
    answer of a request that came after it."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
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
    def ok(self) -> bool:
        tried = self.finished > 0 and self.kills + self.stops > 0
        lost = any(getattr(self, name) for name in MUST_BE_ZERO)
        return tried and not lost and self.max_recovery_s < RECOVERY_S

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
            "max_recovery_s": round(self.max_recovery_s, 3),
            "failures": dict(self.failures),
            "faults": {f"{kind}@{stage}": n for (kind, stage), n in sorted(self.faults.items())},
            "notes": self.notes,
            "elapsed_s": round(self.elapsed_s, 1),
            "ok": self.ok,
        }


def coverage_table(report: SoakReport) -> Table:
    """Fault by stage of a request's life: how often it was injected there."""
    kinds = sorted({kind for kind, _ in report.faults})
    table = Table(box=SIMPLE_HEAD, title="Faults injected", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for kind in kinds:
        table.add_column(kind)
    stages = [stage.value for stage in Stage]
    others = sorted({place for _, place in report.faults} - set(stages))
    for place in [*stages, *others]:
        table.add_row(place, *(str(report.faults[kind, place] or "·") for kind in kinds))
    return table


def figures_table(report: SoakReport) -> Table:
    table = Table("figure", "value", box=SIMPLE_HEAD)
    for name, value in report.as_dict().items():
        if name not in ("faults", "notes"):
            shown = ", ".join(f"{k} {n}" for k, n in value.items()) if isinstance(value, dict) else str(value)
            table.add_row(name, shown)
    for note in report.notes:
        table.add_row("note", Text(note))  # words of a log: nothing in brackets is a style
    return table
