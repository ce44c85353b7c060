"""The only way for bytes to become trusted: digests computed here, compared with those that were announced.

Guarantees: nobody else can make a `VerifiedPages`; one exists only if every byte of both caches of every page in it
gave the announced digest, at the announced place in the prompt (or was digested here, for pages that this node's own
engine wrote); otherwise a `DigestMismatch` names each bad page and which of its caches is wrong.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import numpy as np
import numpy.typing as npt

from pdkv.errors import BadPage, DigestMismatch, listed
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, ReservationId, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.gpudirect import flush
from pdkv.kvcache.page_digest import NO_DIGEST, check_algorithm, digest_pages
from pdkv.kvcache.pool import SlotPool

_PROOF = object()


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

    def verify(self, arrival: Arrival) -> VerifiedPages:
        """Raises `DigestMismatch` with every bad page; the bytes of the pool are not changed.

        In a device's memory, what a NIC wrote there is made visible to the device first.
        """
        if self.pool.memory.memory == "VRAM":
            flush(self.pool.memory.device)
        have = digest_pages(self.pool, arrival.pages, self.algorithm)
        wrong = have != arrival.digests
        if self.checks_digests and wrong.any():
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
