"""What a leader and its ranks say to each other.

Guarantees: every message says whose rank it is meant for; page ids, counts and lengths are bounded, so that what a rank
checks are columns that belong together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdkv.ids import Int32Array, LocalPages, PageHashes, PeerName, RemotePages, ReservationId, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.node.ranks import Entry, Joining, NewPeer, Op, RankOutcome, RankRead, RankStep, StepKind
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import contract_from_pb, contract_to_pb, peer_from_pb, peer_to_pb
from pdkv.rpc.convert.intro import MAX_METADATA_BYTES, MAX_POOL_PAGES, pool_from_pb, pool_to_pb
from pdkv.transfer.engine import Flow, ReadOrder, ReadStatus
from pdkv.v1 import rank_pb2

MAX_LOG_ENTRIES = 1 << 16
MAX_NUMBERS = 8


def joining_to_pb(joining: Joining) -> rank_pb2.Joining:
    contract = contract_to_pb(joining.contract)
    return rank_pb2.Joining(leader=peer_to_pb(joining.leader), contract=contract, num_pages=joining.num_pages)


def joining_from_pb(message: rank_pb2.Joining) -> Joining:
    checks.present(message, "leader", "contract")
    checks.within("num_pages", message.num_pages, 2, MAX_POOL_PAGES)
    return Joining(peer_from_pb(message.leader), contract_from_pb(message.contract), message.num_pages)


def entries_to_pb(leader: PeerName, first: int, entries: Sequence[Entry]) -> rank_pb2.Entries:
    found = [
        rank_pb2.Entry(
            op=entry.op,
            reservation=entry.reservation,
            pages=checks.raw(entry.pages),
            hashes=entry.hashes.raw,
            numbers=entry.numbers,
            reason=entry.reason[: checks.MAX_TEXT],
        )
        for entry in entries
    ]
    return rank_pb2.Entries(leader=peer_to_pb(leader), first=first, entries=found)


def entries_from_pb(message: rank_pb2.Entries) -> list[Entry]:
    checks.bounded("entries", message.entries, MAX_LOG_ENTRIES)
    return [_entry(entry) for entry in message.entries]


def _entry(entry: rank_pb2.Entry) -> Entry:
    checks.bounded("entry.numbers", entry.numbers, MAX_NUMBERS)
    return Entry(
        op=Op(checks.one_of("entry.op", entry.op, list(Op))),
        reservation=ReservationId(entry.reservation),
        pages=_pages("entry.pages", entry.pages),
        hashes=PageHashes(entry.hashes),
        numbers=tuple(entry.numbers),
        reason=checks.text("entry.reason", entry.reason),
    )


def new_peer_to_pb(leader: PeerName, peer: NewPeer) -> rank_pb2.NewPeer:
    return rank_pb2.NewPeer(
        leader=peer_to_pb(leader),
        name=peer_to_pb(peer.name),
        metadata=peer.metadata,
        metadata_checksum=peer.metadata_checksum,
        pool=pool_to_pb(peer.pool),
    )


def new_peer_from_pb(message: rank_pb2.NewPeer) -> NewPeer:
    checks.present(message, "name", "pool")
    checks.within("metadata, bytes", len(message.metadata), 1, MAX_METADATA_BYTES)
    return NewPeer(peer_from_pb(message.name), message.metadata, message.metadata_checksum, pool_from_pb(message.pool))


def read_to_pb(leader: PeerName, read: RankRead) -> rank_pb2.RankRead:
    order, flow = read.order, read.order.flow
    return rank_pb2.RankRead(
        leader=peer_to_pb(leader),
        read_id=read.read_id,
        after=read.after,
        peer=peer_to_pb(order.peer),
        local=checks.raw(order.local.array),
        remote=checks.raw(order.remote.array),
        generations=checks.raw(order.generations),
        hashes=order.hashes.raw,
        deadline_s=order.deadline_s,
        flow=None if flow is None else rank_pb2.RankFlow(id=flow.id, pages=flow.pages, after=flow.after),
    )


def read_from_pb(message: rank_pb2.RankRead, num_pages: int) -> RankRead:
    """`num_pages`: of the rank's own pool; remote pages are checked by the plan of the read."""
    checks.present(message, "peer")
    local = LocalPages.checked(_pages("local", message.local), num_pages)
    order = ReadOrder(
        peer=peer_from_pb(message.peer),
        local=local,
        remote=RemotePages.checked(_pages("remote", message.remote), MAX_POOL_PAGES),
        generations=checks.raw_column("generations", message.generations, np.uint64, len(local)),
        hashes=PageHashes(message.hashes),
        deadline_s=checks.duration_s("deadline_s", message.deadline_s),
        flow=_flow(message.flow) if message.HasField("flow") else None,
    )
    return RankRead(message.read_id, message.after, order)


def _flow(message: rank_pb2.RankFlow) -> Flow:
    checks.within("flow.pages", message.pages, 0, MAX_POOL_PAGES)
    checks.within("flow.after", message.after, 0, MAX_POOL_PAGES)
    return Flow(message.id, message.pages, message.after)


def outcome_to_pb(outcome: RankOutcome) -> rank_pb2.RankOutcome:
    stale = np.flatnonzero(outcome.stale).tolist()
    return rank_pb2.RankOutcome(status=outcome.status, stale=stale, reason=outcome.reason[: checks.MAX_TEXT])


def outcome_from_pb(message: rank_pb2.RankOutcome, pages: int) -> RankOutcome:
    checks.bounded("stale", message.stale, pages)
    stale = np.zeros(pages, np.bool_)
    for place in message.stale:
        checks.within("stale", place, 0, pages - 1)
        stale[place] = True
    status = ReadStatus(checks.one_of("status", message.status, list(ReadStatus)))
    return RankOutcome(status, stale, message.reason[: checks.MAX_TEXT])


def arrival_to_pb(leader: PeerName, arrival: Arrival, after: int) -> rank_pb2.RankArrival:
    return rank_pb2.RankArrival(
        leader=peer_to_pb(leader),
        after=after,
        reservation=arrival.reservation,
        first_index=arrival.first_index,
        pages=checks.raw(arrival.pages.array),
        hashes=arrival.hashes.raw,
        digests=checks.raw(arrival.digests),
    )


def arrival_from_pb(message: rank_pb2.RankArrival, num_pages: int) -> Arrival:
    pages = LocalPages.checked(_pages("pages", message.pages), num_pages)
    return Arrival(
        reservation=ReservationId(message.reservation),
        first_index=message.first_index,
        pages=pages,
        hashes=PageHashes(message.hashes),
        digests=digests_from("digests", message.digests, len(pages)),
    )


def digests_from(field: str, raw: bytes, pages: int) -> UInt64Array:
    """uint64 [pages, 2]."""
    return checks.raw_column(field, raw, np.uint64, 2 * pages).reshape(pages, 2)


def step_to_pb(leader: PeerName, step: RankStep) -> rank_pb2.RankStep:
    return rank_pb2.RankStep(
        leader=peer_to_pb(leader),
        kind=step.kind,
        after=step.after,
        tokens=checks.tokens_raw(step.tokens),
        start=step.start,
        pages=checks.raw(step.pages),
    )


def step_from_pb(message: rank_pb2.RankStep) -> RankStep:
    checks.within("start", message.start, 0, checks.MAX_TOKENS)
    return RankStep(
        kind=StepKind(checks.one_of("kind", message.kind, list(StepKind))),
        after=message.after,
        tokens=checks.tokens_from(message.tokens),
        start=message.start,
        pages=_pages("pages", message.pages),
    )


def _pages(field: str, raw: bytes) -> Int32Array:
    """What can be page ids of a pool; which pool's, the caller knows."""
    pages: Int32Array = checks.words(field, raw, "<i4", checks.MAX_PAGES).astype(np.int32, copy=False)
    if pages.size:
        checks.within(field, int(pages.min()), 0, MAX_POOL_PAGES)
    return pages
