"""Peers come, leave and come again: what is refused, what waits, and what stands beside what."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdkv.errors import BoundsError, ContractMismatch, DeadlineExceeded, LaneRefused, PdkvError, PeerLost, ProtocolError
from pdkv.geometry.page_layout import Region
from pdkv.transfer.backends.base import Lane
from pdkv.transfer.backends.loopback import Fault, FaultKind
from pdkv.transfer.orders import PeerOffer, ReadStatus, TransferSettings
from pdkv.transfer.tasks import Ticket
from tests.transfer.pairs import FAR_S, CorePair
from tests.transfer.pools import TestPool, offer_of, peer_name

HANG = Fault(FaultKind.HANG)


def cut(offer: PeerOffer) -> PeerOffer:
    return replace(offer, metadata=offer.metadata[:-3])


def of_another(offer: PeerOffer) -> PeerOffer:
    return offer_of(offer.metadata.replace(b"prefill", b"prefile"), TestPool(seed=1))


def other_segments(offer: PeerOffer) -> PeerOffer:
    first, *rest = offer.pool.segments
    return replace(offer, pool=replace(offer.pool, segments=(replace(first, name="main.7"), *rest)))


def unregistered(offer: PeerOffer) -> PeerOffer:
    pool = offer.pool
    moved = tuple(replace(s, base=s.base + (1 << 32)) for s in pool.segments)
    regions = tuple(Region(r.address + (1 << 32), r.length) for r in pool.regions)
    return replace(offer, pool=replace(pool, segments=moved, regions=regions))


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (cut, ProtocolError, "is damaged"),
        (of_another, ProtocolError, "metadata of prefile"),
        (other_segments, ContractMismatch, r"segments\[0\]: mine main.0 .* theirs main.7"),
        (unregistered, BoundsError, "registered memory"),
    ],
)
def test_a_bad_offer_is_refused_and_leaves_nothing_behind(
    spoil: Callable[[PeerOffer], PeerOffer], error: type[PdkvError], match: str
) -> None:
    pair = CorePair(connect=False)
    good = offer_of(pair.source.metadata, pair.source_pool)
    with pytest.raises(error, match=match):
        pair.add(pair.source_name, spoil(good))
    assert not pair.sink.peers
    pair.done(pair.add(pair.source_name, good))
    assert pair.done(pair.read([1], [1])).status is ReadStatus.DONE


def test_adding_twice_waits_for_the_same_first_read() -> None:
    pair = CorePair(connect=False)
    offer = offer_of(pair.source.metadata, pair.source_pool)
    pair.net.script(pair.source_name, Fault(FaultKind.LATE, polls=5))
    first, second = pair.add(pair.source_name, offer), pair.add(pair.source_name, offer)
    pair.step(2)
    assert not first.done()
    assert not second.done()
    with pytest.raises(PeerLost, match="not connected"):
        pair.read([1], [1])
    pair.done(first)
    assert second.done()
    assert pair.add(pair.source_name, offer).done()


def test_a_peer_that_doesnt_answer_is_not_added_and_can_come_again() -> None:
    pair = CorePair(connect=False)
    offer = offer_of(pair.source.metadata, pair.source_pool)
    pair.net.script(pair.source_name, HANG)
    silent = pair.add(pair.source_name, offer)
    pair.step(2)
    with pytest.raises(DeadlineExceeded):
        pair.done(silent, later_s=FAR_S)
    with pytest.raises(PeerLost, match="have not settled"):
        pair.add(pair.source_name, offer)
    pair.net.settle(pair.source_name)
    pair.step(3)
    assert pair.source_name not in pair.sink.peers
    pair.done(pair.add(pair.source_name, offer))


def test_a_peer_that_is_gone_already_is_not_added() -> None:
    pair = CorePair(connect=False)
    pair.net.kill(pair.source_name)
    with pytest.raises(PeerLost, match="is gone"):
        pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)))
    pair.step()
    assert not pair.sink.peers


def test_a_lane_that_is_no_rdma_is_refused_when_rdma_is_required() -> None:
    pair = CorePair(settings=TransferSettings(require_rdma=True), connect=False)
    with pytest.raises(LaneRefused, match="go over loopback"):
        pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)))
    pair.step()
    assert not pair.sink.peers


def test_a_peer_leaves_when_its_last_read_has_settled() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    running = pair.read([1], [1])
    pair.step(2)
    leaving = [pair.remove(pair.source_name), pair.remove(pair.source_name)]
    with pytest.raises(PeerLost, match="not connected"):
        pair.read([2], [2])
    pair.step(10)
    assert not leaving[0].done()
    pair.net.settle(pair.source_name)
    assert pair.done(running).status is ReadStatus.DONE, "a read that runs may end well"
    for future in leaving:
        pair.done(future)
    assert pair.remove(pair.source_name).done(), "an unknown peer is removed already"
    pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)))


def test_a_new_incarnation_stands_beside_the_old_one() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    old = pair.read([1], [1])
    pair.step(2)
    reborn_name, reborn_pool = peer_name("prefill"), TestPool(seed=3)
    reborn = pair.core(reborn_name, reborn_pool)
    pair.done(pair.add(reborn_name, offer_of(reborn.metadata, reborn_pool)))
    order = replace(
        pair.order([2], [2]),
        peer=reborn_name,
        generations=reborn_pool.generations([2]),
        hashes=reborn_pool.hashes([2]),
    )
    ticket: Ticket = Ticket()
    pair.sink.read(order, ticket)
    assert pair.done(ticket.future).status is ReadStatus.DONE
    assert pair.sink_pool.page(2) == reborn_pool.page(2)
    assert not old.done()


def test_where_all_readers_copy_by_themselves_nobody_needs_to_look() -> None:
    pair = CorePair(rails=2, connect=False)
    assert pair.sink.carries, "nobody is known yet: whoever comes may read over a socket"
    pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)))
    first, second = pair.sink.peers[pair.source_name].lines
    first.lane = Lane("cma", copied=True)
    assert pair.sink.carries
    second.lane = Lane("cma", copied=True)
    assert not pair.sink.carries
