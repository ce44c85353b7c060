"""Every error that pdkv raises on purpose, in one file.

Guarantees: each class has a gRPC status name (`status`), a stable `kind`, and `fields` with the names and both
values, so that the same error reads alike in a log, a status detail and a test. Third-party errors are mapped to
these at the edge where they appear; a bare `Exception` is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar


class PdkvError(Exception):
    """Root of the tree. `status` is the gRPC code's name; `fields` are the facts, as text."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields: Mapping[str, str] = {k: str(v) for k, v in fields.items()}

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def differences(self) -> Sequence[Difference]:
        """The differing fields of two contracts or accounts; empty for other errors."""
        return ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on which two nodes disagree."""

    field: str
    mine: str
    theirs: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field}: mine {self.mine}, theirs {self.theirs} (rule: {self.rule})"


# --- bad input ------------------------------------------------------------------------------------------------------


class ConfigError(PdkvError):
    """A configuration or model config can't be used: names the field, its value and what is allowed."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, have: object, allowed: object) -> None:
        """`have` None: it was not given at all."""
        words = f"{field}: not given" if have is None else f"{field}: {have!r} can't be used"
        words += f"; allowed: {allowed}"
        super().__init__(words, field=field, have=have, allowed=allowed)


class BoundsError(PdkvError):
    """An index, length or id lies outside what it belongs to; also for what a peer sent."""

    status = "OUT_OF_RANGE"

    def __init__(self, what: str, have: object, allowed: object) -> None:
        super().__init__(f"{what}: {have}; allowed: {allowed}", what=what, have=have, allowed=allowed)


class ProtocolError(PdkvError):
    """A peer's message breaks the protocol: wrong order, wrong hash, wrong length. Ends that call only."""

    status = "INVALID_ARGUMENT"


class FieldRefused(PdkvError):
    """A field of a client's HTTP request can't be used: names the field, its value and what is allowed."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, have: str, allowed: str) -> None:
        words = f"{field}: {have} can't be used; allowed: {allowed}"
        super().__init__(words, field=field, have=have, allowed=allowed)


class UnknownModel(PdkvError):
    """A client asks for a model that isn't served here: names those that are."""

    status = "NOT_FOUND"

    def __init__(self, have: str, served: Sequence[str]) -> None:
        allowed = ", ".join(served)
        super().__init__(f"model: {have!r} is not served; served: {allowed}", field="model", have=have, allowed=allowed)


class BodyTooLarge(BoundsError):
    """A client's HTTP request has a larger body than may be."""


class SlowClient(PdkvError):
    """A client takes too long to send its HTTP request."""

    status = "DEADLINE_EXCEEDED"


class MissingDependency(PdkvError):
    """An optional package is not installed; says what to install: an extra of pdkv's own, or the package itself."""

    status = "UNIMPLEMENTED"

    def __init__(self, package: str, why: str, *, extra: str = "", detail: str = "") -> None:
        install = f"pip install '.[{extra}]' in pdkv's source" if extra else f"pip install {package}"
        words = f"{why} needs {package}: {install}" + (f" ({detail})" if detail else "")
        super().__init__(words, package=package, install=install)


# --- two nodes disagree -----------------------------------------------------------------------------------------------


class ContractMismatch(PdkvError):
    """Two nodes must not exchange pages: lists every differing field with both values."""

    status = "FAILED_PRECONDITION"

    def __init__(self, differences: Sequence[Difference]) -> None:
        self._differences = tuple(differences)
        super().__init__("contracts differ: " + "; ".join(map(str, differences)), fields=len(differences))

    @property
    def differences(self) -> Sequence[Difference]:
        return self._differences


class AccountMismatch(ContractMismatch):
    """Prefill's account of a request is not decode's own: not admitted."""


class WrongIncarnation(PdkvError):
    """A message for another life of this node, or from a peer that is not connected: connect again."""

    status = "FAILED_PRECONDITION"


class DuplicateRequest(PdkvError):
    """This caller already runs a request of this id."""

    status = "ALREADY_EXISTS"


# --- who may do what --------------------------------------------------------------------------------------------------


class NotAuthorised(PdkvError):
    """A certificate's names don't allow the call, or aren't those of the node that it is made for."""

    status = "PERMISSION_DENIED"


class KeyRefused(PdkvError):
    """An HTTP request bears no key, or none that is known here."""

    status = "UNAUTHENTICATED"


class AddressRefused(PdkvError):
    """A request names a prefill node that this decode node wasn't told of: names the address and what is allowed."""

    status = "PERMISSION_DENIED"

    def __init__(self, address: str, allowed: Sequence[str]) -> None:
        ways = ", ".join(allowed) or "none"
        words = f"{address} may not be dialled from here; allowed: {ways} (prefill_addresses and prefill_allow)"
        super().__init__(words, prefill_address=address, allowed=ways)


# --- capacity ---------------------------------------------------------------------------------------------------------


class CapacityError(PdkvError):
    """Not enough pages now (`RESOURCE_EXHAUSTED`); says what is short, in pages."""

    status = "RESOURCE_EXHAUSTED"


class NeverFits(CapacityError):
    """The request is larger than the whole pool: waiting doesn't help."""

    status = "OUT_OF_RANGE"


class LimitReached(CapacityError):
    """One peer has as many calls or leases at once as one peer may have: names the limit and the peer."""


class RouterFull(CapacityError):
    """A router runs as many requests, and has as many that wait, as it may: names both limits and when to come back."""


# --- the data path ----------------------------------------------------------------------------------------------------


class PeerLost(PdkvError):
    """The peer's process or its connection is gone."""

    status = "UNAVAILABLE"


class NotAPrefillNode(PeerLost):
    """Something answers at the address, and it is no prefill node."""


class NotADecodeNode(PeerLost):
    """Something answers at the address, and it is no decode node."""


class TlsRefused(PeerLost):
    """No connection, as one side doesn't take the other's certificate; says which, and what to look at."""


class TransferError(PdkvError):
    """A read ended without its data: failed, or no end was seen before its deadline."""

    status = "UNAVAILABLE"


class TransferUnsettled(TransferError):
    """The read has no proven end; its destination pages are quarantined."""


class StalePages(PdkvError):
    """Source pages were reused while they were read (generation or hash moved): the read is void."""

    status = "ABORTED"


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page whose bytes are not what was announced."""

    index: int
    """Its place in the prompt."""
    page: int
    """Its local page id."""
    cache: str
    """"main", "index" or "both"."""
    source: int | None = None
    """Page id in the pool that it was read from."""
    rank: str = ""
    """Of a decode group, the rank whose bytes they are."""

    def __str__(self) -> str:
        read_from = "" if self.source is None else f", read from remote page {self.source}"
        rank = f" of rank {self.rank}" if self.rank else ""
        return f"prompt page {self.index} in local page {self.page}{rank}: {self.cache}{read_from}"


def listed(bad: Sequence[BadPage]) -> str:
    """The first 16 by name, and how many more there are."""
    more = f"; and {len(bad) - 16} more" if len(bad) > 16 else ""
    return "; ".join(map(str, bad[:16])) + more


class DigestMismatch(PdkvError):
    """Bytes that arrived are not the bytes that were sealed: names each page and which cache of it."""

    status = "DATA_LOSS"

    def __init__(self, message: str, *, bad: Sequence[BadPage] = (), **fields: object) -> None:
        super().__init__(message, **fields)
        self.bad = tuple(bad)


class BadLogits(PdkvError):
    """The engine's logits hold NaN or infinity: no token is drawn from them."""


class ReservationDead(PdkvError):
    """A commit came for a reservation that has ended; nothing was committed."""

    status = "ABORTED"


class UnknownRequest(PdkvError):
    """A call is about a request that doesn't run here: it has ended, or never came."""

    status = "NOT_FOUND"


class LeaseExpired(PdkvError):
    """The lease is unknown or over; a late renewal revives nothing."""

    status = "NOT_FOUND"


class DiscoveryFailed(PdkvError):
    """Where nodes are couldn't be learnt: names the place and what went wrong. Those that are known stay known."""

    status = "UNAVAILABLE"

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}", place=place)


class LaneRefused(PdkvError):
    """RDMA was required and another lane would be used."""

    status = "FAILED_PRECONDITION"


# --- the life of a request or node ------------------------------------------------------------------------------------


class DeadlineExceeded(PdkvError):
    """A wait ended by its deadline; names what was waited for."""

    status = "DEADLINE_EXCEEDED"


class RequestCancelled(PdkvError):
    """The caller went away or asked for the end."""

    status = "CANCELLED"


class Draining(PdkvError):
    """The node takes no new requests; another node may."""

    status = "UNAVAILABLE"


class RemoteError(PdkvError):
    """A peer answered with a status that has no class here; keeps its code and words."""

    status = "UNKNOWN"


# --- a bug here -------------------------------------------------------------------------------------------------------


class IntegrityError(PdkvError):
    """This node's own bookkeeping contradicts itself, or its memory can't be read; never caused by what others sent."""


# --- on purpose -------------------------------------------------------------------------------------------------------


class InjectedFault(PdkvError):
    """Raised by a fault plan: names the stage or call."""

    status = "ABORTED"
