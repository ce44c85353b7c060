"""Checks of other nodes: their contract, the lane to them, and how fast it is.

Guarantees: a peer is visited, so it doesn't learn that we exist and loses nothing when we go; what is read goes into
memory of our own and is thrown away; contracts are compared as nodes compare them, with every difference by its field.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdkv.cli.doctor.finding import Finding, fail, ok, size, warn
from pdkv.cli.doctor.needs import Needs
from pdkv.cli.plan.live import shape_of
from pdkv.cli.status import status_of
from pdkv.contract import Contract, diff
from pdkv.errors import PdkvError, RemoteError, TransferError
from pdkv.geometry.page_layout import page_format
from pdkv.ids import SINK_PAGE, LocalPages, NodeId, PageHashes, PeerName, RemotePages, new_incarnation
from pdkv.kvcache.pool import SlotPool
from pdkv.machine.devices import Devices
from pdkv.node.messages import NodeIntro, NodeStatus
from pdkv.rpc.client import GrpcDirectory
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.backends.base import Lane
from pdkv.transfer.engine import ReadOrder, ReadStatus, TransferEngine

READ_BYTES = 64 << 20
READS = 5
READ_DEADLINE_S = 30.0
_ON_ONE_HOST = frozenset({"cma", "knem", "posix", "self", "sysv", "xpmem", "cuda_ipc"})


@dataclass(frozen=True, slots=True)
class Visited:
    """A node that answered."""

    address: str
    status: NodeStatus
    intro: NodeIntro | None
    """None of a node that takes no visitors: decode nodes don't, nor do older versions."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Reads of one peer's pages."""

    lane: Lane
    read_bytes: int
    """Of each of them."""
    bytes_per_s: tuple[float, ...]


async def visit(directory: GrpcDirectory, address: str) -> Visited | Finding:
    """A finding if it can't be used as a peer at all."""
    check = f"peer {address}"
    try:
        status = await status_of(directory, address)
        if not isinstance(status, NodeStatus):
            return fail(check, "a router, which has no pages", "name decode and prefill nodes")
        return Visited(address, status, await _introduced(directory, address))
    except PdkvError as error:
        todo = "see that it serves there, and the names in certificates"
        return fail(check, f"can't be asked: {error.kind}: {error}", todo)


def state(peer: Visited) -> Finding:
    """What the node says of itself."""
    check, status = f"peer {peer.address}", peer.status
    words = f"{status.role} {status.name}, {status.contract.version}, {status.pages.get('total', 0):,} pages"
    words += f"; registered {status.memory['registered']}" if "registered" in status.memory else ""
    if status.unready:
        return warn(check, f"{words}, not ready: {status.unready}", "see its own doctor")
    return ok(check, words)


def contracts(mine: Contract | None, peers: Sequence[Visited]) -> Iterator[Finding]:
    """Against this node's, or without one against the first peer's."""
    if mine is None and not peers:
        return
    reference, of = (mine, "this node's") if mine is not None else (peers[0].status.contract, peers[0].address)
    for peer in peers if mine is not None else peers[1:]:
        check, theirs = f"contract {peer.address}", peer.status.contract
        differences = diff(reference, theirs)
        if not differences:
            yield ok(check, f"as {of}: content {theirs.content_fingerprint.hex()[:12]}")
            continue
        words = "; ".join(f"{d.field}: {d.mine} here, {d.theirs} there ({d.rule})" for d in differences)
        yield fail(check, f"not {of}: {words}", "start both with equal settings of these fields: they would be refused")


async def lane(peer: Visited, needs: Needs, found: Devices) -> Finding:
    """What UCX selects for reads from the peer, and their rate."""
    check = f"lane {peer.address}"
    if peer.intro is None:
        if peer.status.role != "prefill":
            return ok(check, "not measured: only prefill nodes take visitors")
        return warn(check, "not measured: it takes no visitors", "a node of this version")
    try:
        measured = await asyncio.to_thread(measure, peer.intro)
    except PdkvError as error:
        return fail(
            check,
            f"can't be read from: {error.kind}: {error}",
            "see rdma, ucx and the firewall: UCX uses ports of its own",
        )
    return judged(check, measured, needs, found)


def judged(check: str, measured: Measured, needs: Needs, found: Devices) -> Finding:
    """A lane and its rate against what is required and what there is."""
    used, rates = measured.lane, measured.bytes_per_s
    rate = f"{max(rates) / 1e9:.3g} GB/s, best of {len(rates)} reads of {size(measured.read_bytes)}"
    words = f"{used.name}, {rate} ({used.detail})" if used.detail else f"{used.name}, {rate}"
    if used.rdma:
        return ok(check, words)
    if needs.require_rdma:
        return fail(
            check, f"not ready: RDMA is required, but reads go over {words}", "see rdma and ucx, here and there"
        )
    if used.name == "unknown":
        return warn(check, words, "let UCX log to a file, or unset UCX_LOG_FILE and UCX_PROTO_INFO")
    if found.usable_rdma and not _ON_ONE_HOST.issuperset(used.name.split("+")):
        return warn(check, f"RDMA is there and isn't used: {words}", "see rdma and ucx, here and there")
    return ok(check, words)


def measure(intro: NodeIntro) -> Measured:
    """Read pages of a node over NIXL. Raises `ConfigError` for pages not known here, and what reading raises."""
    contract = intro.contract
    fmt = page_format(shape_of(contract), main_row=contract.main_row_format)
    count = min(max(READ_BYTES // fmt.page_bytes, 1), intro.pool.num_pages - 1)
    pool = SlotPool.create(fmt, count + 1)
    pool.memory.commit()
    own = PeerName(NodeId(f"doctor-{secrets.token_hex(4)}"), new_incarnation())
    engine = TransferEngine(backend_factory("nixl"), own, pool.map())
    try:
        engine.add_peer(intro.name, intro.agent_metadata, intro.metadata_checksum, intro.pool).result()
        rates = tuple(_read(engine, intro, count) for _ in range(READS))
        return Measured(engine.lane_detail(intro.name), count * fmt.page_bytes, rates)
    finally:
        engine.close()
        pool.close()


def _read(engine: TransferEngine, intro: NodeIntro, count: int) -> float:
    """Bytes a second of one read. What the pages hold is nobody's business: their rows are not looked at."""
    pages = np.arange(SINK_PAGE + 1, SINK_PAGE + 1 + count, dtype=np.int32)
    order = ReadOrder(
        intro.name,
        LocalPages.checked(pages, count + 1),
        RemotePages.checked(pages, intro.pool.num_pages),
        np.zeros(count, np.uint64),
        PageHashes(bytes(32 * count)),
        READ_DEADLINE_S,
    )
    outcome = engine.read(order).result()
    if outcome.status is not ReadStatus.DONE:
        raise TransferError(f"a read ended {outcome.status}: {outcome.reason}", peer=intro.name)
    return outcome.bytes / outcome.elapsed_s


async def _introduced(directory: GrpcDirectory, address: str) -> NodeIntro | None:
    try:
        return await directory.visit(address).introduce()
    except RemoteError as error:
        if error.fields.get("code") != "UNIMPLEMENTED":
            raise
        return None
