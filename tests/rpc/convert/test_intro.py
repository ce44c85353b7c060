"""Introductions: the version first, then everything else in bounds."""

from collections.abc import Callable

import pytest

from pdkv.errors import BoundsError, ContractMismatch, PdkvError, ProtocolError
from pdkv.geometry.page_layout import layer_major, pool_map
from pdkv.rpc.convert import intro
from pdkv.v1 import prefill_pb2
from tests.rpc import samples

Body = prefill_pb2.IntroductionBody


def test_there_and_back() -> None:
    mine = samples.intro()
    wire = intro.introduction_to_pb(mine).SerializeToString()
    assert intro.introduction_from_pb(prefill_pb2.Introduction.FromString(wire)) == mine


def test_a_layer_major_pool_travels_with_its_addresses() -> None:
    placement = layer_major(samples.FORMAT, 16)
    addresses = [(i + 1) << 32 for i in range(len(placement.buffer_bytes))]
    pool = pool_map(samples.FORMAT, placement, addresses, 2**64 - 16 * 64, 64, "VRAM", 7)
    assert intro.pool_from_pb(intro.pool_to_pb(pool)) == pool


@pytest.mark.parametrize("body", [b"", b"\xff\xff\xff not protobuf"])
def test_a_newer_major_is_refused_before_its_body_is_read(body: bytes) -> None:
    newer = prefill_pb2.Introduction(protocol_major=2, content_fingerprint=b"of another length", body=body)
    with pytest.raises(ContractMismatch) as caught:
        intro.introduction_from_pb(newer)
    (only,) = caught.value.differences
    assert (only.field, only.mine, only.theirs) == ("protocol_major", "1", "2")


def test_a_body_that_is_no_body_is_a_protocol_error() -> None:
    message = intro.introduction_to_pb(samples.intro())
    message.body = b"\xff\xff\xff not protobuf"
    with pytest.raises(ProtocolError, match="body"):
        intro.introduction_from_pb(message)


def test_a_fingerprint_that_its_contract_does_not_give_is_refused() -> None:
    message = intro.introduction_to_pb(samples.intro())
    message.content_fingerprint = samples.contract("another").content_fingerprint
    with pytest.raises(ContractMismatch, match="content_fingerprint"):
        intro.introduction_from_pb(message)


def _set(path: str, value: object) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        *parents, last = path.split(".")
        target = body
        for part in parents:
            target = getattr(target, part)
        setattr(target, last, value)

    return change


def _columns(path: str, values: list[object]) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        column = getattr(body.pool, path)
        del column[:]
        column.extend(values)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b: b.ClearField("name"), "name"),
        (lambda b: b.ClearField("contract"), "contract"),
        (lambda b: b.ClearField("pool"), "pool"),
        (_set("name.incarnation", "x"), "incarnation"),
        (_set("contract.protocol_major", 2), "protocol_major"),
        (_set("agent_metadata", b""), "agent_metadata"),
        (_set("agent_metadata", bytes((1 << 20) + 1)), "agent_metadata"),
        (_set("pool.num_pages", 1), r"pool\.num_pages"),
        (_set("pool.num_pages", 2**31), r"pool\.num_pages"),
        (_set("pool.page_tokens", 0), r"pool\.page_tokens"),
        (_set("pool.table_stride", 32), r"pool\.table_stride"),
        (_set("pool.table_base", 2**64 - 64), r"pool\.table_base"),
        (_set("pool.memory", "DISK"), r"pool\.memory"),
        (_set("pool.device", 2000), r"pool\.device"),
        (_columns("segment_lengths", [1]), r"pool\.segment_lengths"),
        (_columns("segment_bases", [1]), r"pool\.segment_bases"),
        (_columns("segment_strides", []), r"pool\.segment_strides"),
        (_columns("segment_names", []), r"pool\.segment_names"),
        (_columns("segment_names", ["x"] * 4097), r"pool\.segment_names"),
        (_columns("region_addresses", [1, 2]), r"pool\.region_addresses"),
        (_columns("region_lengths", [0]), r"pool\.region_lengths"),
        (_columns("region_addresses", [2**64 - 1]), r"pool\.region_lengths"),
        (_columns("region_lengths", [64]), "segment"),
        (_columns("segment_bases", [2**64 - 1] * len(samples.FORMAT.segments)), "segment"),
    ],
)
def test_a_peers_body_is_checked(change: Callable[[Body], None], named: str) -> None:
    message = intro.introduction_to_pb(samples.intro())
    body = Body.FromString(message.body)
    change(body)
    message.body = body.SerializeToString()
    with pytest.raises(PdkvError, match=rf"^(contract\.)?{named}") as caught:
        intro.introduction_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)
