"""The stages of a request's life on the two nodes, by name, and the hook that is called when one is reached.

Guarantees: a hook runs in the node's loop, between two steps of the state machine; without one nothing is done. What
it raises fails the request there, as anything else that fails there would.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pdkv.ids import RequestId


class Stage(StrEnum):
    """In the order of a request's life; not every request reaches all of them, some reach one several times."""

    QUEUED = "decode.queued"
    """Waits for pages."""
    RESERVED = "decode.reserved"
    """Has all its pages; nothing was asked of a prefill node."""
    LENT = "decode.lent"
    """Another node than prefill has lent pages; none is read."""
    ASKED = "decode.asked"
    ACCEPTED = "decode.accepted"
    """The lease is known."""
    READING = "decode.reading"
    """A read was posted."""
    ARRIVED = "decode.arrived"
    """A read ended DONE, its rows were equal; its digests are not verified."""
    COMMITTED = "decode.committed"
    """Verified pages are in the tree."""
    PREFILLED = "decode.prefilled"
    """PrefillDone was heard."""
    RECOMPUTING = "decode.recomputing"
    """Before a chunk that the decode node computes itself."""
    ADMITTED = "decode.admitted"
    """Before the first token leaves the node."""
    DECODING = "decode.decoding"
    """Before a step."""
    LEASED = "prefill.leased"
    """The lease is granted, Accepted not sent."""
    PULLING = "prefill.pulling"
    """A read of pages that decode has was posted."""
    PULLED = "prefill.pulled"
    """Such pages are verified and in the tree."""
    COMPUTING = "prefill.computing"
    """Before a chunk."""
    SEALED = "prefill.sealed"
    """Pages are final and in the tree, not announced yet."""
    DONE = "prefill.done"
    """Everything is said but PrefillDone."""
    RENEWED = "prefill.renewed"
    RELEASED = "prefill.released"


Hook = Callable[[Stage, RequestId], None]


def no_hook(stage: Stage, request: RequestId) -> None:
    """Nobody watches."""
