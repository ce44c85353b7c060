"""The only way for bytes to become trusted: digests computed here, compared with those that were announced.

Guarantees: nobody else can make a `VerifiedPages`; one exists only if every byte of both caches of every page in it
gave the announced digest, at the announced place in the prompt (or was digested here, for pages that this node's own
engine wrote); otherwise a `DigestMismatch` names each bad page and which of its caches is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from pdkv.errors import BadPage, DigestMismatch, listed
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, ReservationId, UInt32Array, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.gpudirect import flush
from pdkv.kvcache.page_digest import NO_DIGEST, PageRows, check_algorithm, digest_pages
from pdkv.kvcache.pool import SlotPool

_PROOF = object()
Soon = Callable[..., object]
"""Called with a step and its arguments, to be done behind what was given before."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedPages:
    """Pages whose bytes are proved, for one reservation: what a commit takes. Only a `Verifier` can make one."""

    reservation: ReservationId
    first_index: int
    pages: LocalPages
    hashes: PageHashes
    digests: UInt64Array
    """Read-only uint64 [pages, 2], as computed here."""
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("VerifiedPages are made by a Verifier only")
        self.digests.flags.writeable = False

    def __len__(self) -> int:
        return len(self.pages)


class Verifier:
    """Digests pages of one pool with the algorithm that a pair of nodes agreed on."""

    def __init__(self, pool: SlotPool, algorithm: str = "xxh3_64") -> None:
        """Raises `ConfigError` on an unknown algorithm."""
        check_algorithm(algorithm)
        self.pool = pool
        self.algorithm = algorithm

    @property
    def checks_digests(self) -> bool:
        """False where this node was told to check nothing: announced digests are then not compared."""
        return self.algorithm != NO_DIGEST

    @property
    def watches(self) -> bool:
        """Whether `watch` is of use."""
        return self.checks_digests and PageRows.of(self.pool) is not None

    def watch(self, arrival: Arrival, soon: Soon) -> WatchedArrival | None:
        """The arrival, for a read that is about to begin; None where to look at single pages while they land is no use:
        nothing is checked, a device digests them all at once, or each lies in many pieces.

        What `soon` is given has to be done, in its order, before the arrival is verified.
        """
        rows = PageRows.of(self.pool) if self.checks_digests else None
        if rows is None:
            return None
        announced = (arrival.reservation, arrival.first_index, arrival.pages, arrival.hashes, arrival.digests)
        return WatchedArrival(*announced, self, soon, rows)

    def verify(self, arrival: Arrival) -> VerifiedPages:
        """Raises `DigestMismatch` with every bad page; the bytes of the pool are not changed.

        In a device's memory, what a NIC wrote there is made visible to the device first.
        """
        if self.pool.memory.memory == "VRAM":
            flush(self.pool.memory.device)
        if isinstance(arrival, WatchedArrival) and arrival.verifier is self:
            have = arrival.have()
        else:
            have = digest_pages(self.pool, arrival.pages, self.algorithm)
        wrong = have != arrival.digests
        if self.checks_digests and np.count_nonzero(wrong):
            raise _mismatch(arrival, wrong)
        return VerifiedPages(
            arrival.reservation, arrival.first_index, arrival.pages, arrival.hashes, have, proof=_PROOF
        )

    def seal(
        self, reservation: ReservationId, first_index: int, pages: LocalPages, hashes: PageHashes
    ) -> VerifiedPages:
        """Digest pages that this node's own engine has *finished* writing: they are what is meant by definition.

        Raises `BoundsError` unless there is one hash a page.
        """
        digests = digest_pages(self.pool, pages, self.algorithm)
        own = Arrival(reservation, first_index, pages, hashes, digests)
        return VerifiedPages(own.reservation, own.first_index, own.pages, own.hashes, digests, proof=_PROOF)


@dataclass(frozen=True, slots=True, eq=False)
class WatchedArrival(Arrival):
    """Pages that are digested as they land, behind the thread that reads them: the `transfer.orders.Witness` of a read.

    What was seen of a page counts only until something writes there again. `Verifier.watch` makes one.
    """

    verifier: Verifier
    soon: Soon
    rows: PageRows
    taken: UInt64Array = field(init=False)
    """uint64 [pages, 2]."""
    written: UInt32Array = field(init=False)
    """How often a page was to be written, uint32 [pages]."""
    seen: UInt32Array = field(init=False)
    """After which of those times it was digested: two threads may meet here, so each writes to one column only."""

    def __post_init__(self) -> None:
        super(WatchedArrival, self).__post_init__()
        pages = len(self.pages)
        object.__setattr__(self, "taken", np.zeros((pages, len(Group)), np.uint64))
        object.__setattr__(self, "written", np.ones(pages, np.uint32))
        object.__setattr__(self, "seen", np.zeros(pages, np.uint32))

    def begins(self, part: slice) -> None:
        self.written[part] += 1

    def landed(self, part: slice) -> None:
        self.soon(self._look, part, self.written[part].copy())

    def _look(self, part: slice, written: UInt32Array) -> None:
        for column, digests in enumerate(self.rows.digests(self.pages.array[part].tolist())):
            self.taken[part, column] = digests
        self.seen[part] = written

    def have(self) -> UInt64Array:
        """uint64 [pages, 2] of what landed last, once nothing writes there; what was missed is digested now."""
        missed = self.seen != self.written
        if missed.any():
            self.taken[missed] = digest_pages(self.verifier.pool, self.pages.where(missed), self.verifier.algorithm)
            self.seen[missed] = self.written[missed]
        return self.taken.copy()


def _mismatch(arrival: Arrival, wrong: npt.NDArray[np.bool_]) -> DigestMismatch:
    """Names every page with a true entry in `wrong`, bool [pages, 2]."""
    rows = np.flatnonzero(wrong.any(axis=1)).tolist()
    bad = []
    for row, page in zip(rows, arrival.pages.array[rows].tolist(), strict=True):
        caches = [group.value for group, differs in zip(Group, wrong[row].tolist(), strict=True) if differs]
        bad.append(BadPage(arrival.first_index + row, page, "both" if len(caches) == len(Group) else caches[0]))
    words = listed(bad)
    return DigestMismatch(
        f"bytes of {len(bad)} of {len(wrong)} pages are not what was announced: {words}",
        bad=bad,
        reservation=arrival.reservation,
        bad_pages=words,
    )
