"""Pages of a retracted request in host memory, and what may be retracted.

Guarantees: a copy holds both caches of every page that has tokens, whole index pages among them, and nothing behind the
last token; it is loaded into other pages byte for byte, proved by the digests that were taken when it was saved, or
`DigestMismatch` names the pages; all copies together take at most the bytes that were allowed; a request is retracted
only if nobody else may write to or was promised a page of its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdkv.errors import BadPage, BoundsError, CapacityError, DigestMismatch, ReservationDead, listed
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, UInt64Array
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import PageState
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool


@dataclass(frozen=True, eq=False, slots=True)
class HostCopy:
    """The first `tokens` tokens of a sequence: page i of it is row i of each array."""

    tokens: int
    rows: tuple[npt.NDArray[np.uint8], ...]
    """uint8 [pages, bytes], main then index."""
    digests: UInt64Array
    """uint64 [pages, 2]."""

    @property
    def pages(self) -> int:
        return len(self.digests)

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.rows)


class HostStore:
    """Copies of pages of one pool. `save` and `load` may run in a thread beside the owner of the pages."""

    def __init__(self, pool: SlotPool, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._pool = pool
        self._copies: set[HostCopy] = set()
        self._promised = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._promised

    def save(self, pages: LocalPages, tokens: int) -> HostCopy:
        """Copy the pages that hold the first `tokens` tokens of a sequence; the last one is zeroed behind them.

        Nobody writes to them meanwhile, and the last one, if it isn't full, is nobody else's: that is the caller's
        word. Raises `BoundsError` unless these are as many pages as the tokens take, `CapacityError` beyond the limit.
        """
        fmt = self._pool.fmt
        if tokens < 1 or len(pages) != -(-tokens // fmt.page_tokens):
            raise BoundsError("pages to save", len(pages), f"those of {tokens} tokens, at least one")
        wanted = len(pages) * fmt.page_bytes
        with self._lock:
            left = self.limit_bytes - self._promised
            if wanted > left:
                raise CapacityError(
                    f"{len(pages)} pages to save are {wanted} B, {left} of {self.limit_bytes} B of host memory left",
                    wanted_pages=len(pages),
                    short_bytes=wanted - left,
                )
            self._promised += wanted
        try:
            if tokens % fmt.page_tokens:
                self._pool.zero_tail(int(pages.array[-1]), tokens % fmt.page_tokens)
            rows = tuple(_read(self._pool, pages, group) for group in Group)
            copy = HostCopy(tokens, rows, digest_pages(self._pool, pages))
        except BaseException:
            with self._lock:
                self._promised -= wanted
            raise
        with self._lock:
            self._copies.add(copy)
        return copy

    def load(self, copy: HostCopy, first: int, pages: LocalPages) -> None:
        """Write the pages of the copy from its `first` one on into `pages`, and prove that they are what was saved.

        Raises `DigestMismatch` naming those that are not, `BoundsError` unless `pages` are as many as there are.
        """
        if not 0 <= first <= copy.pages or len(pages) != copy.pages - first:
            raise BoundsError("pages to load into", len(pages), f"{copy.pages} less the first {first}")
        for group, rows in zip(Group, copy.rows, strict=True):
            _write(self._pool, pages, group, rows[first:])
        wrong = digest_pages(self._pool, pages) != copy.digests[first:]
        bad = [
            BadPage(
                first + row, int(pages.array[row]), "both" if wrong[row].all() else list(Group)[wrong[row].argmax()]
            )
            for row in np.flatnonzero(wrong.any(axis=1)).tolist()
        ]
        if bad:
            raise DigestMismatch(f"{len(bad)} pages came back from host memory otherwise: {listed(bad)}", bad=bad)

    def drop(self, copy: HostCopy) -> None:
        """Its memory may go. A second call does nothing."""
        with self._lock:
            if copy in self._copies:
                self._copies.remove(copy)
                self._promised -= copy.bytes


def require_retractable(manager: CacheManager, reservation: Reservation) -> None:
    """The request may end now and come back later: its prompt is committed, and every page after it is its own private
    one, so not reserved for a read that may be running, not quarantined, and not handed over to a lease.

    Raises `BoundsError` naming the page otherwise, `ReservationDead` if it has ended.
    """
    if manager.reservations.get(reservation.id) is not reservation:
        raise ReservationDead(f"reservation {reservation.id} has ended", reservation=reservation.id)
    if reservation.committed != len(reservation.hashes):
        allowed = f"{len(reservation.hashes)}: all of the prompt's"
        raise BoundsError("committed pages of a request to retract", reservation.committed, allowed)
    own = reservation.sequence[reservation.committed :]
    manager.ownership.require(own, reservation.id, PageState.PRIVATE)


def freed_by_end(manager: CacheManager, reservation: Reservation) -> int:
    """Pages that would be free or evictable if the reservation ended now."""
    own = manager.ownership.held(reservation.pages, reservation.id, PageState.RESERVED, PageState.PRIVATE)
    return int(own.sum()) + sum(node.pages.size for node in reservation.node.path() if node.locks == 1)


def _read(pool: SlotPool, pages: LocalPages, group: Group) -> npt.NDArray[np.uint8]:
    """uint8 [pages, bytes of the group], in segment order."""
    out = np.empty((len(pages), sum(piece.length for piece in pool.pieces(group))), np.uint8)
    at = 0
    for piece in pool.pieces(group):
        view = pool.piece_view(piece)
        if view.device.type == "cpu":
            out[:, at : at + piece.length] = view.numpy()[pages.array]
        else:
            out[:, at : at + piece.length] = view[_column(pages, view.device)].cpu().numpy()
        at += piece.length
    return out


def _write(pool: SlotPool, pages: LocalPages, group: Group, rows: npt.NDArray[np.uint8]) -> None:
    at = 0
    for piece in pool.pieces(group):
        view, part = pool.piece_view(piece), rows[:, at : at + piece.length]
        if view.device.type == "cpu":
            view.numpy()[pages.array] = part
        else:
            view[_column(pages, view.device)] = torch.from_numpy(np.ascontiguousarray(part)).to(view.device)
        at += piece.length
    pool.memory.settle()


def _column(pages: LocalPages, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(pages.array.astype(np.int64)).to(device)
