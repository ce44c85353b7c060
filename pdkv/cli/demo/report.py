"""What the demo found, as one JSON object and as a table.

Guarantees: `ok` is the conjunction of all named checks, and an absent check is a failed one; the table and the object
are made from the same values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pdkv.node.messages import Shipment

CHECKS = {
    "tokens": "tokens equal one process's, every request",
    "logits": "logits bit-identical, every token",
    "chunks": "cold prompts came in at least two chunks",
    "pages": "pages shipped + pages hit = pages of the prompt",
    "hits": "hits are exactly the shared pages",
    "bytes": "bytes are the missing pages, main and index both",
    "telemetry": "bytes equal what the transfer backend counted",
    "controls": "every injected fault caught before decode, page named",
    "index_read": "without digests, lost index-K changes tokens",
    "refusals": "unequal nodes refused, field and both values named",
    "killed": "prefill killed after PrefillDone, decode finished",
    "speculation": "speculative answers are plain ones, drafts are one process's",
    "draft_state": "lost draft state refused by name",
    "preempted": "requests that gave their pages away came back and said the same tokens",
    "shipped_again": "an evicted prefix was shipped again, tokens equal",
}


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that was served, compared with the same request in one process."""

    name: str
    kind: str
    output_tokens: int
    shipment: Shipment
    expected_hit_pages: int
    tokens_equal: bool
    logits_equal: bool

    @property
    def transfer_gb_s(self) -> float:
        """10^9 bytes a second while a read was running."""
        moved = self.shipment.bytes_main + self.shipment.bytes_index
        return moved / self.shipment.transfer_s / 1e9 if self.shipment.transfer_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            **asdict(self.shipment),
            "output_tokens": self.output_tokens,
            "expected_hit_pages": self.expected_hit_pages,
            "tokens_equal": self.tokens_equal,
            "logits_equal": self.logits_equal,
            "transfer_gb_s": self.transfer_gb_s,
        }


@dataclass(frozen=True, slots=True)
class ControlRow:
    """A fault that was put into the destination's memory, and what came of it."""

    fault: str
    expected: str
    found: str
    ok: bool


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """A node that must not be paired, and the field that said so."""

    node: str
    field: str
    mine: str
    theirs: str
    ok: bool


@dataclass(slots=True)
class Report:
    backend: str = ""
    lane: str = ""
    requests: list[RequestRow] = field(default_factory=list)
    controls: list[ControlRow] = field(default_factory=list)
    refusals: list[RefusalRow] = field(default_factory=list)
    speculative: list[dict[str, Any]] = field(default_factory=list)
    """A request each: what became of its drafts, and what was compared."""
    pressed: list[dict[str, Any]] = field(default_factory=list)
    """A request each on a pool that is too small: how often it gave way, pages hit and shipped, what was compared."""
    checks: dict[str, bool] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        return all(self.checks.get(name, False) for name in CHECKS)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "backend": self.backend,
            "lane": self.lane,
            "elapsed_s": self.elapsed_s,
            "requests": [row.as_dict() for row in self.requests],
            "controls": [asdict(row) for row in self.controls],
            "refusals": [asdict(row) for row in self.refusals],
            "speculative": self.speculative,
            "pressed": self.pressed,
            "checks": {name: self.checks.get(name, False) for name in CHECKS},
        }


def mark(ok: object) -> Text:
    """A cell: True, False, or None for not known yet."""
    if ok is None:
        return Text("…", style="dim")
    return Text("✓", style="green") if ok else Text("✗", style="bold red")


def _table(title: str) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def request_table(rows: list[RequestRow]) -> Table:
    """Fits 80 columns; the JSON object has more."""
    table = _table("Requests")
    table.add_column("request", no_wrap=True)
    for name in ("tokens", "hit", "shipped", "MB", "GB/s", "prefill", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tok=", "log="):
        table.add_column(name, justify="center", no_wrap=True)
    for row in rows:
        s = row.shipment
        table.add_row(
            row.name,
            f"{s.prompt_tokens:,}",
            str(s.pages_hit),
            str(s.pages_shipped),
            f"{(s.bytes_main + s.bytes_index) / 1e6:.2f}",
            f"{row.transfer_gb_s:.2f}",
            f"{s.prefill_s:.2f} s",
            f"{s.exposed_transfer_s * 1e3:.1f} ms",
            mark(row.tokens_equal),
            mark(row.logits_equal),
        )
    table.caption = "hit, shipped: pages of 64 tokens; exposed: from prefill's end to admission"
    return table


def speculative_table(report: Report) -> Table:
    table = _table("Drafts")
    table.add_column("request", no_wrap=True)
    for name in ("steps", "drafted", "accepted", "undone", "a step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tok=", "log=", "draft="):
        table.add_column(name, justify="center", no_wrap=True)
    for row in report.speculative:
        table.add_row(
            row["name"],
            *(str(row[name]) for name in ("steps", "drafted", "accepted", "rolled_back_tokens")),
            f"{row['mean_accepted_length']:.2f}",
            *(mark(row[name]) for name in ("tokens_equal", "logits_equal", "drafts_equal")),
        )
    table.caption = "undone: rolled back; a step: tokens a verification gave; draft=: draft logits"
    return table


def pressed_table(report: Report) -> Table:
    table = _table("Small pools")
    table.add_column("request", no_wrap=True)
    for name in ("gave way", "hit", "shipped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tok=", justify="center", no_wrap=True)
    for row in report.pressed:
        counts = (str(row[name]) for name in ("preemptions", "pages_hit", "pages_shipped"))
        table.add_row(row["name"], *counts, mark(row["tokens_equal"]))
    table.caption = "gave way: to another request, and came back; hit, shipped: pages of 64 tokens"
    return table


def control_table(report: Report) -> Table:
    table = _table("What must not pass")
    table.add_column("injected")
    table.add_column("found", overflow="fold")
    table.add_column("", justify="center")
    for row in report.controls:
        table.add_row(row.fault, Text(row.found), mark(row.ok))
    for refused in report.refusals:
        found = Text(f"refused: {refused.field}\nmine   {refused.mine}\ntheirs {refused.theirs}")
        table.add_row(f"node of other {refused.node}", found, mark(refused.ok))
    return table


def check_table(report: Report) -> Table:
    table = _table("Checks")
    table.show_header = False
    table.add_column("")
    table.add_column("", justify="center")
    for name, words in CHECKS.items():
        table.add_row(words, mark(report.checks.get(name)))
    return table
