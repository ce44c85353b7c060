"""Faults that can be put into what arrived: into a pool's memory after a read, or into the draft hand-off,
before either is verified.

Guarantees: a fault is named in the request, is refused by a node that was not started to allow it, and changes exactly
what its name says. They are the negative controls of the digests: each must be caught, with its page or field named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import DraftHandoff


def _drop_index(pool: SlotPool, pages: LocalPages) -> None:
    """Index-K of every page of the read is lost, as when a transfer forgets the second cache."""
    for page in pages:
        for part in pool.group_views(page, Group.INDEX):
            part.zero_()
    pool.memory.settle()


def _zero_page(pool: SlotPool, pages: LocalPages) -> None:
    """The last page never arrived."""
    pool.zero(pages[-1:])


def _swap_pages(pool: SlotPool, pages: LocalPages) -> None:
    """First and last page changed places; does nothing to a read of one page."""
    if len(pages) < 2:
        return
    first, last = int(pages.array[0]), int(pages.array[-1])
    for group in Group:
        for a, b in zip(pool.group_views(first, group), pool.group_views(last, group), strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
    pool.memory.settle()


def _flip_bit(pool: SlotPool, pages: LocalPages) -> None:
    """One bit of the middle page's main bytes."""
    part = pool.group_views(int(pages.array[len(pages) // 2]), Group.MAIN)[0]
    part[len(part) // 2] ^= 1
    pool.memory.settle()


FAULTS: dict[str, Callable[[SlotPool, LocalPages], None]] = {
    "drop-index": _drop_index,
    "zero-page": _zero_page,
    "swap-pages": _swap_pages,
    "flip-bit": _flip_bit,
}


def _drop_draft_rows(pool: SlotPool, pages: LocalPages) -> None:
    """The draft layer's rows of every page are lost, as when a transfer knows only the model's own layers."""
    for page in pages:
        for group in Group:
            segments = [s for s in pool.fmt.segments if s.group is group]
            for segment, part in zip(segments, pool.group_views(page, group), strict=True):
                if segment.name.startswith("draft_"):
                    part.zero_()
    pool.memory.settle()


DRAFT_FAULTS: dict[str, Callable[[SlotPool, LocalPages], None]] = {"drop-draft-rows": _drop_draft_rows}
"""For pages that have draft segments."""

HANDOFF_FAULTS: dict[str, Callable[[DraftHandoff], DraftHandoff]] = {
    "drop-hidden": lambda draft: replace(draft, hidden=np.zeros_like(draft.hidden)),
    "drop-draft-tokens": lambda draft: replace(draft, tokens=np.zeros_like(draft.tokens)),
    "drop-seed": lambda draft: replace(draft, index_seed=np.full_like(draft.index_seed, -1)),
}
"""What a transfer that forgets draft state leaves of it."""


def handoff_fault_named(name: str) -> Callable[[DraftHandoff], DraftHandoff]:
    """What the fault makes of a draft hand-off: nothing, if it is one of pages. `fault_named` refuses names."""
    return HANDOFF_FAULTS.get(name, lambda draft: draft)


def fault_named(name: str, *, allowed: bool) -> Callable[[SlotPool, LocalPages], None] | None:
    """None for the empty name and for a fault of the hand-off.

    Raises `ConfigError` for an unknown fault, or where faults are not allowed.
    """
    if not name:
        return None
    if not allowed:
        raise ConfigError("fault", name, "none: this node was not started with --allow-fault-injection")
    of_pages = FAULTS | DRAFT_FAULTS
    if name not in of_pages | HANDOFF_FAULTS:
        raise ConfigError("fault", name, ", ".join((*of_pages, *HANDOFF_FAULTS)))
    return of_pages.get(name)
