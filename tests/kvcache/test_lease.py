"""Leases end once, in time, and nothing revives them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, DuplicateRequest, LeaseExpired, LimitReached
from pdkv.ids import Incarnation, LeaseId, NodeId, PeerName
from pdkv.kvcache.lease import LeaseTable

OWNER = PeerName(NodeId("decode-0"), Incarnation("a" * 32))
REBORN = PeerName(NodeId("decode-0"), Incarnation("b" * 32))
A, B = LeaseId("a"), LeaseId("b")


def test_a_renewed_head_does_not_delay_the_others() -> None:
    table = LeaseTable()
    table.grant(A, OWNER, 30, 0)
    table.grant(B, OWNER, 30, 1)
    table.renew(A, OWNER, 29)
    assert table.next_expiry_s == 31
    assert [lease.lease_id for lease in table.expire(31)] == [B]
    assert table.next_expiry_s == 59
    assert [lease.lease_id for lease in table.expire(59)] == [A]
    assert table.next_expiry_s is None


def test_a_late_renewal_revives_nothing() -> None:
    table = LeaseTable()
    table.grant(A, OWNER, 30, 0)
    with pytest.raises(LeaseExpired):
        table.renew(A, OWNER, 30)  # over, though nobody has looked yet
    assert len(table.expire(30)) == 1
    with pytest.raises(LeaseExpired):
        table.renew(A, OWNER, 30)
    assert A not in table


def test_release_is_idempotent() -> None:
    table = LeaseTable()
    table.grant(A, OWNER, 30, 0)
    assert table.release(A, OWNER)
    assert not table.release(A, OWNER)
    assert table.expire(1000) == []
    assert len(table) == 0


def test_a_node_has_no_more_than_its_share_whatever_its_lives() -> None:
    table, other = LeaseTable(per_node=2), PeerName(NodeId("decode-1"), Incarnation("a" * 32))
    table.grant(A, OWNER, 30, 0)
    table.grant(B, REBORN, 30, 1)
    with pytest.raises(LimitReached, match="decode-0 holds 2 leases; one node may hold 2"):
        table.grant(LeaseId("c"), OWNER, 30, 2)
    assert LeaseId("c") not in table
    table.grant(LeaseId("d"), other, 30, 2)
    table.renew(A, OWNER, 2)
    assert table.release(B, REBORN)
    table.require_room(OWNER)
    assert len(table.expire(40)) == 2
    assert not table._held


def test_another_life_of_the_owner_has_no_say() -> None:
    table = LeaseTable()
    table.grant(A, OWNER, 30, 0)
    with pytest.raises(LeaseExpired):
        table.renew(A, REBORN, 1)
    assert not table.release(A, REBORN)
    assert A in table


def test_an_id_in_use_and_a_ttl_that_is_none_are_refused() -> None:
    table = LeaseTable()
    table.grant(A, OWNER, 30, 0)
    with pytest.raises(DuplicateRequest):
        table.grant(A, OWNER, 30, 0)
    for ttl_s in (0, -1, math.inf, math.nan):
        with pytest.raises(BoundsError):
            table.grant(B, OWNER, ttl_s, 0)
    assert len(table) == 1


def test_those_that_expire_first_are_told_first() -> None:
    table = LeaseTable()
    for lease_id, ttl_s in ((A, 30), (B, 10), (LeaseId("c"), 20)):
        table.grant(lease_id, OWNER, ttl_s, 0)
    assert [lease.ttl_s for lease in table.first(2)] == [10, 20]
    table.renew(B, OWNER, 25 - 16)
    assert [lease.lease_id for lease in table.first(9)] == [B, "c", A]
    table.renew(B, OWNER, 18)
    assert [lease.lease_id for lease in table.first(9)] == ["c", B, A]


@given(
    st.lists(st.tuples(st.sampled_from(["grant", "renew", "release", "expire"]), st.integers(0, 4), st.integers(0, 9)))
)
def test_against_a_dict_of_expiries(steps: list[tuple[str, int, int]]) -> None:
    table, model, now = LeaseTable(), dict[LeaseId, tuple[float, float]](), 0.0
    for what, number, passed in steps:
        now += passed
        lease_id, ttl_s = LeaseId(str(number)), 5.0 + number
        if what == "grant" and lease_id not in model:
            table.grant(lease_id, OWNER, ttl_s, now)
            model[lease_id] = (ttl_s, now + ttl_s)
        elif what == "renew" and lease_id in model and model[lease_id][1] > now:
            assert table.renew(lease_id, OWNER, now).expires_s == now + ttl_s
            model[lease_id] = (ttl_s, now + ttl_s)
        elif what == "release":
            assert table.release(lease_id, OWNER) == (model.pop(lease_id, None) is not None)
        elif what == "expire":
            over = {i for i, (_, expires) in model.items() if expires <= now}
            found = table.expire(now)
            assert {lease.lease_id for lease in found} == over
            assert [lease.expires_s for lease in found] == sorted(lease.expires_s for lease in found)
            model = {i: kept for i, kept in model.items() if i not in over}
        assert len(table) == len(model)
        assert table.next_expiry_s == min((expires for _, expires in model.values()), default=None)
