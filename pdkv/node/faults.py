"""Faults that can be put into a destination pool's memory after a read and before its verification.

Guarantees: a fault is named in the request, is refused by a node that was not started to allow it, and changes exactly
what its name says. They are the negative controls of the digests: each must be caught, with its page named.
"""

from __future__ import annotations

from collections.abc import Callable

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool


def _drop_index(pool: SlotPool, pages: LocalPages) -> None:
    """Index-K of every page of the read is lost, as when a transfer forgets the second cache."""
    for page in pages:
        for part in pool.group_bytes(page, Group.INDEX):
            part[:] = 0


def _zero_page(pool: SlotPool, pages: LocalPages) -> None:
    """The last page never arrived."""
    pool.zero(pages[-1:])


def _swap_pages(pool: SlotPool, pages: LocalPages) -> None:
    """First and last page changed places; does nothing to a read of one page."""
    if len(pages) < 2:
        return
    first, last = int(pages.array[0]), int(pages.array[-1])
    for group in Group:
        for a, b in zip(pool.group_bytes(first, group), pool.group_bytes(last, group), strict=True):
            kept = a.copy()
            a[:] = b
            b[:] = kept


def _flip_bit(pool: SlotPool, pages: LocalPages) -> None:
    """One bit of the middle page's main bytes."""
    part = pool.group_bytes(int(pages.array[len(pages) // 2]), Group.MAIN)[0]
    part[len(part) // 2] ^= 1


FAULTS: dict[str, Callable[[SlotPool, LocalPages], None]] = {
    "drop-index": _drop_index,
    "zero-page": _zero_page,
    "swap-pages": _swap_pages,
    "flip-bit": _flip_bit,
}


def fault_named(name: str, *, allowed: bool) -> Callable[[SlotPool, LocalPages], None] | None:
    """None for the empty name. Raises `ConfigError` for an unknown fault, or where faults are not allowed."""
    if not name:
        return None
    if not allowed:
        raise ConfigError("fault", name, "none: this node was not started with --allow-fault-injection")
    if name not in FAULTS:
        raise ConfigError("fault", name, ", ".join(FAULTS))
    return FAULTS[name]
