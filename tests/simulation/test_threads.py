"""The simulated thread of a transfer looks as soon as the product's would find something to do."""

from __future__ import annotations

import pytest

from tests.simulation.runs import several
from tests.simulation.threads import SimulatedTransfer, _may_go

SEEDS = range(60)
SOON_S = 0.001


def _stalled(transfer: SimulatedTransfer) -> bool:
    """Another line of the peer shows that one is down, and nobody has looked yet."""
    stall_s, now = transfer.settings.line_stall_s, transfer.process.time()
    for peer in transfer.core.peers.values():
        quiet = [line for line in peer.up if line.running and now - line.quiet_s >= stall_s and not peer.lost]
        if any(o.moved_s > now - stall_s / 4 for line in quiet for o in peer.up if o is not line):
            return True
    return False


def test_what_is_due_has_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen, late = SimulatedTransfer._step, {"fenced off": 0, "stalled": 0}, list[str]()

    def looked_at(transfer: SimulatedTransfer) -> None:
        step(transfer)
        if transfer.closed:
            return
        due_s = transfer._due.when() - transfer.process.time() if transfer._due else float("inf")
        if any(_may_go(rail.readers._retired) for rail in transfer.core._rails):
            seen["fenced off"] += 1
            late.extend(["fenced off"] * (due_s > SOON_S))
        if _stalled(transfer):
            seen["stalled"] += 1
            late.extend(["stalled"] * (due_s > transfer.settings.line_stall_s / 2))

    monkeypatch.setattr(SimulatedTransfer, "_step", looked_at)
    assert not several(SEEDS).failed
    assert all(count > 9 for count in seen.values()), seen
    assert not late
