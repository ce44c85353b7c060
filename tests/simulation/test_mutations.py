"""The negative controls: each build that is broken on purpose is noticed, soon, and by the law that is meant."""

from __future__ import annotations

import re

import pytest

from tests.simulation.mutations import HARMLESS, MUTATIONS
from tests.simulation.runs import several

SEEDS = 150
"""Most that it may take: ten seconds of one core."""
CAUGHT = {
    "freed-on-release": "writes to a page it lost|got a new owner under a read|two reads write",
    "freed-on-timer": "got a new owner under a read|writes to a page it lost|two reads write",
    "reuse-without-bump": "but was|writes to sealed pages",
    "sealed-page-rewritten": "writes to sealed pages",
    "rows-before-data": "other bytes than its fresh row says",
    "generations-from-zero": "but was",
    "row-buffer-reused": "two reads write to the same bytes",
    "commit-unbound": "wrong bytes|sealed|against the tree|not the bytes of its hash",
    "digest-skipped": "wrong bytes",
    "account-skipped": "on a wrong account",
    "index-apart": "wrong bytes",
    "step-abandoned": "the engine writes to",
    "pulled-in-place": "are written to by the engine under a read",
    "read-again-before-the-fence": "two reads write|writes to a page it lost|got a new owner under a read",
    "no-fence": "never come to rest",
    "pages-leaked": "never come to rest",
    "blacklisted": "gets nothing from",
}


@pytest.mark.parametrize("mutation", list(MUTATIONS))
def test_a_broken_build_is_noticed(mutation: str) -> None:
    total = several(range(SEEDS), mutation=mutation, stop_at=CAUGHT[mutation])
    laws = list(total.failed.values())
    assert re.search(CAUGHT[mutation], laws[-1] if laws else ""), f"{total.seeds} seeds held this law; others: {laws}"


@pytest.mark.parametrize("mutation", list(HARMLESS))
def test_what_a_broken_build_needs_beside_its_breach_breaks_nothing(mutation: str) -> None:
    assert not several(range(40), mutation=mutation).failed
