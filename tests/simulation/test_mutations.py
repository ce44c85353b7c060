"""The negative controls: each build that is broken on purpose is noticed, soon, and by the law that is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, islice
from random import Random

import pytest

from tests.simulation.fabric import CORRUPTS
from tests.simulation.faults import draw
from tests.simulation.mutations import HARMLESS, MUTATIONS
from tests.simulation.nodes import Shape
from tests.simulation.run import FAULTS
from tests.simulation.runs import several

SEEDS = 150
"""Most that it may take: ten seconds of one core."""
WATCHED = ("seen-under-way", "seen-once", "seen-in-reverse")
"""They break what sees pages land: it matters where reads are copied, and to safety where some are corrupted."""
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
    "seen-under-way": "wrong bytes|not the bytes of its hash|the answer is",
    "seen-once": "wrong bytes|not the bytes of its hash|the answer is",
    "seen-in-reverse": "gets nothing from",
}


def _copied_and_corrupted() -> Iterator[int]:
    """Seeds of worlds in which reads are copied into whole pages, and some are to be corrupted: one in thirty."""
    for seed in count():
        plan = Random(f"plan of {seed}")
        shape = Shape.drawn(plan)
        corrupted = any(fault.kind in CORRUPTS for fault in draw(plan, FAULTS))
        if shape.copied and "page_major" in shape.placements and corrupted:
            yield seed


@pytest.mark.parametrize("mutation", list(MUTATIONS))
def test_a_broken_build_is_noticed(mutation: str) -> None:
    seeds = list(islice(_copied_and_corrupted(), SEEDS)) if mutation in WATCHED else range(SEEDS)
    total = several(seeds, mutation=mutation, stop_at=CAUGHT[mutation])
    laws = list(total.failed.values())
    assert re.search(CAUGHT[mutation], laws[-1] if laws else ""), f"{total.seeds} seeds held this law; others: {laws}"


@pytest.mark.parametrize("mutation", list(HARMLESS))
def test_what_a_broken_build_needs_beside_its_breach_breaks_nothing(mutation: str) -> None:
    assert not several(range(40), mutation=mutation).failed
