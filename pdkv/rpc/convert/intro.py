"""Introductions at `Connect`.

Guarantees: the protocol's major version is looked at first and a newer peer is refused by name, whatever the rest of
its message is; agent metadata and pool addresses are bounded before they reach anything.
"""

from __future__ import annotations

from typing import Literal, cast

from google.protobuf.message import DecodeError

from pdkv.contract import PROTOCOL_MAJOR
from pdkv.errors import ContractMismatch, Difference, ProtocolError
from pdkv.geometry.page_layout import PoolMap, Region, SegmentMap
from pdkv.node.messages import NodeIntro
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import contract_from_pb, contract_to_pb, peer_from_pb, peer_to_pb
from pdkv.v1 import prefill_pb2

MAX_METADATA_BYTES = 1 << 20
MAX_POOL_PAGES = 2**31 - 1
"""Page ids are int32."""
TABLE_ROW_BYTES = 64
MEMORIES = ("DRAM", "VRAM")


def introduction_to_pb(intro: NodeIntro) -> prefill_pb2.Introduction:
    body = prefill_pb2.IntroductionBody(
        name=peer_to_pb(intro.name),
        contract=contract_to_pb(intro.contract),
        agent_metadata=intro.agent_metadata,
        metadata_checksum=intro.metadata_checksum,
        pool=pool_to_pb(intro.pool),
    )
    return prefill_pb2.Introduction(
        protocol_major=intro.contract.protocol_major,
        content_fingerprint=intro.contract.content_fingerprint,
        body=body.SerializeToString(),
    )


def introduction_from_pb(message: prefill_pb2.Introduction) -> NodeIntro:
    """Raises `ContractMismatch` for another major version, or a content fingerprint that the contract doesn't give (a
    peer of a later minor version with a content field that is unknown here)."""
    if message.protocol_major != PROTOCOL_MAJOR:
        raise _mismatch("protocol_major", str(PROTOCOL_MAJOR), str(message.protocol_major), "pair: equal")
    announced = checks.sized("content_fingerprint", message.content_fingerprint, 32)
    try:
        body = prefill_pb2.IntroductionBody.FromString(message.body)
    except DecodeError as error:
        raise ProtocolError("the introduction's body can't be decoded", field="body") from error
    checks.present(body, "name", "contract", "pool")
    contract = contract_from_pb(body.contract)
    if contract.protocol_major != message.protocol_major:
        raise ProtocolError("protocol_major of the contract is not the introduction's", field="contract.protocol_major")
    if contract.content_fingerprint != announced:
        computed = contract.content_fingerprint.hex()
        raise _mismatch("content_fingerprint", computed, announced.hex(), "content: what its own contract gives")
    checks.within("agent_metadata, bytes", len(body.agent_metadata), 1, MAX_METADATA_BYTES)
    return NodeIntro(
        peer_from_pb(body.name), contract, body.agent_metadata, body.metadata_checksum, pool_from_pb(body.pool)
    )


def pool_to_pb(pool: PoolMap) -> prefill_pb2.PoolMap:
    return prefill_pb2.PoolMap(
        num_pages=pool.num_pages,
        page_tokens=pool.page_tokens,
        segment_names=[s.name for s in pool.segments],
        segment_lengths=[s.length for s in pool.segments],
        segment_bases=[s.base for s in pool.segments],
        segment_strides=[s.stride for s in pool.segments],
        table_base=pool.table_base,
        table_stride=pool.table_stride,
        memory=pool.memory,
        device=pool.device,
        region_addresses=[r.address for r in pool.regions],
        region_lengths=[r.length for r in pool.regions],
    )


def pool_from_pb(message: prefill_pb2.PoolMap) -> PoolMap:
    """Bounds of the whole (segments inside regions, strides) are `PoolMap`'s own; here: columns, words and 64 bits."""
    checks.within("pool.num_pages", message.num_pages, 2, MAX_POOL_PAGES)
    checks.within("pool.page_tokens", message.page_tokens, 1, 1 << 16)
    checks.within("pool.table_stride", message.table_stride, TABLE_ROW_BYTES, 1 << 16)
    checks.within("pool.device", message.device, 0, 1 << 10)
    names, lengths = message.segment_names, message.segment_lengths
    checks.within("pool.segment_names, entries", len(names), 1, checks.MAX_ENTRIES)
    checks.within("pool.region_lengths, entries", len(message.region_lengths), 1, checks.MAX_ENTRIES)
    for field, values, count in (
        ("pool.segment_lengths", lengths, len(names)),
        ("pool.segment_bases", message.segment_bases, len(names)),
        ("pool.segment_strides", message.segment_strides, len(names)),
        ("pool.region_addresses", message.region_addresses, len(message.region_lengths)),
    ):
        if len(values) != count:
            raise ProtocolError(f"{field} has {len(values)} entries, not {count}", field=field)
    regions = tuple(Region(*pair) for pair in zip(message.region_addresses, message.region_lengths, strict=True))
    for region in regions:
        checks.within("pool.region_lengths", region.length, 1, 2**64 - region.address)
    checks.within("pool.table_base", message.table_base, 0, 2**64 - message.num_pages * message.table_stride)
    columns = zip(names, lengths, message.segment_bases, message.segment_strides, strict=True)
    return PoolMap(
        num_pages=message.num_pages,
        page_tokens=message.page_tokens,
        segments=tuple(SegmentMap(checks.name("pool.segment_names", name), *places) for name, *places in columns),
        table_base=message.table_base,
        table_stride=message.table_stride,
        memory=cast(Literal["DRAM", "VRAM"], checks.one_of("pool.memory", message.memory, MEMORIES)),
        device=message.device,
        regions=regions,
    )


def _mismatch(field: str, mine: str, theirs: str, rule: str) -> ContractMismatch:
    return ContractMismatch([Difference(field, mine, theirs, rule)])
