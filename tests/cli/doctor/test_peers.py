"""Peers that serve over gRPC and NIXL in this process, and lanes that it hasn't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdkv.cli.assemble import build_parts, described_contract
from pdkv.cli.doctor import peers
from pdkv.cli.doctor.finding import Finding, Level
from pdkv.cli.doctor.peers import Measured, Visited, contracts, judged, lane, measure, state, visit
from pdkv.config import PrefillConfig
from pdkv.contract import Contract
from pdkv.machine.devices import Devices
from pdkv.node.base import NodeParts
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from pdkv.transfer.backends.base import UNKNOWN_LANE, Lane
from tests.cli.doctor.cases import MIB, NO_RDMA, WITH_RDMA, needs
from tests.rpc import samples
from tests.rpc.fakes import FakeRouter

OK, WARN, FAIL = Level
CONFIG = PrefillConfig(node_id="p0", engine="synthetic", pool_pages=64, chunk_tokens=64)


@pytest.fixture(scope="module")
def parts() -> Iterator[NodeParts]:
    made = build_parts(CONFIG)
    yield made
    made.close()


@asynccontextmanager
async def serving(services: Services) -> AsyncIterator[tuple[GrpcDirectory, str]]:
    server = GrpcServer(Endpoint("127.0.0.1:0"), services, PlainText())
    directory = GrpcDirectory(PlainText())
    await server.start()
    try:
        yield directory, server.address
    finally:
        await directory.close()
        await server.stop(0)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60.0))


def visited(address: str, contract: Contract) -> Visited:
    return Visited(address, replace(samples.status("prefill"), contract=contract), None)


# --- asked ------------------------------------------------------------------------------------------------------------


def test_a_node_is_visited_and_read_from_and_knows_nobody_afterwards(parts: NodeParts) -> None:
    async def body() -> None:
        node = PrefillNode(parts, PrefillSettings(64))
        async with serving(Services(prefill=node, visit=parts.intro)) as (directory, address):
            peer = await visit(directory, address)
            assert isinstance(peer, Visited)
            said = state(peer)
            assert said.level is OK
            assert said.found.startswith(f"prefill {parts.name}, {parts.contract.version}, 63 pages; registered ")
            assert " B as 1 region in " in said.found
            found = await lane(peer, needs(), NO_RDMA)
            assert (found.level, found.check) == (OK, f"lane {address}"), found
            assert " GB/s, best of 5 reads of " in found.found
            assert node.status().peers == {}
            assert node.status().unready == ""
            refused = await lane(peer, needs(require_rdma=True), NO_RDMA)
            assert (refused.level, refused.found[:36]) == (FAIL, "not ready: RDMA is required, but rea")

    run(body)


def test_reads_are_of_the_pages_of_the_pool(parts: NodeParts, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure(parts.intro())
    assert measured.read_bytes == 63 * parts.pool.fmt.page_bytes
    assert len(measured.bytes_per_s) == peers.READS
    assert all(rate > 1e6 for rate in measured.bytes_per_s)
    assert measured.lane.name != "unknown"
    monkeypatch.setattr(peers, "READ_BYTES", 2 * parts.pool.fmt.page_bytes + 1)
    assert measure(parts.intro()).read_bytes == 2 * parts.pool.fmt.page_bytes


def test_a_node_that_can_not_be_read_from_is_a_failure(parts: NodeParts) -> None:
    async def body() -> None:
        cut = replace(parts.intro(), agent_metadata=parts.intro().agent_metadata[:-9])
        found = await lane(Visited("p0:1", samples.status("prefill"), cut), needs(), NO_RDMA)
        assert (found.level, "can't be read from: ProtocolError" in found.found) == (FAIL, True)

    run(body)


def test_a_node_that_takes_no_visitors_is_not_measured() -> None:
    async def body() -> None:
        node = PrefillNode(quiet := build_parts(CONFIG.model_copy(update={"backend": "loopback"})), PrefillSettings(64))
        async with serving(Services(prefill=node)) as (directory, address):
            peer = await visit(directory, address)
            assert isinstance(peer, Visited)
            found = await lane(peer, needs(), NO_RDMA)
            assert (found.level, found.found) == (WARN, "not measured: it takes no visitors")
            decode = await lane(Visited(address, samples.status("decode"), None), needs(), NO_RDMA)
            assert (decode.level, decode.found) == (OK, "not measured: only prefill nodes take visitors")
        quiet.close()

    run(body)


def test_nobody_and_a_router_are_failures() -> None:
    async def body() -> None:
        async with serving(Services(router=FakeRouter())) as (directory, address):
            router = await visit(directory, address)
            assert isinstance(router, Finding)
            assert (router.level, "a router" in router.found) == (FAIL, True)
        async with serving(Services(router=FakeRouter())) as (directory, _):
            nobody = await visit(directory, address)
            assert isinstance(nobody, Finding)
            assert (nobody.level, "can't be asked: PeerLost" in nobody.found) == (FAIL, True)

    run(body)


def test_a_node_that_is_not_ready_says_why() -> None:
    status = replace(samples.status("decode"), unready="no prefill node could be met")
    found = state(Visited("d0:1", status, None))
    assert (found.level, found.found.endswith("not ready: no prefill node could be met")) == (WARN, True)


# --- contracts --------------------------------------------------------------------------------------------------------


def test_contracts_are_compared_with_this_nodes_and_each_difference_is_named() -> None:
    mine = described_contract(CONFIG)
    other = described_contract(CONFIG.model_copy(update={"rollback_tokens": 4, "seed": 1}))
    same, differs = contracts(mine, [visited("a:1", mine), visited("b:1", other)])
    assert (same.level, same.check) == (OK, "contract a:1")
    assert (differs.level, differs.check) == (FAIL, "contract b:1")
    assert "rollback_tokens: 0 here, 4 there (pair: equal)" in differs.found
    assert "weights_id: synthetic/0 here, synthetic/1 there (content: equal)" in differs.found


def test_without_a_model_peers_are_compared_with_the_first() -> None:
    one, other = described_contract(CONFIG), described_contract(CONFIG.model_copy(update={"seed": 1}))
    found = list(contracts(None, [visited("a:1", one), visited("b:1", one), visited("c:1", other)]))
    assert [(f.check, f.level) for f in found] == [("contract b:1", OK), ("contract c:1", FAIL)]
    assert found[1].found.startswith("not a:1: weights_id")
    assert list(contracts(None, [])) == list(contracts(None, [visited("a:1", one)])) == []


# --- lanes that this machine hasn't -----------------------------------------------------------------------------------


def of(name: str, *, rdma: bool = False) -> Measured:
    return Measured(Lane(name, f"zero-copy {name}/x", rdma=rdma), 64 * MIB, (1.0e9, 49.5e9, 2e9))


@pytest.mark.parametrize(
    ("measured", "required", "machine", "level", "words"),
    [
        (
            of("rc_mlx5", rdma=True),
            True,
            WITH_RDMA,
            OK,
            "rc_mlx5, 49.5 GB/s, best of 3 reads of 64 MiB (zero-copy rc_mlx5/x)",
        ),
        (of("tcp"), True, WITH_RDMA, FAIL, "not ready: RDMA is required, but reads go over tcp"),
        (of("cma"), True, NO_RDMA, FAIL, "not ready: RDMA is required, but reads go over cma"),
        (of("tcp"), False, WITH_RDMA, WARN, "RDMA is there and isn't used: tcp"),
        (of("cma"), False, WITH_RDMA, OK, "cma"),
        (of("tcp"), False, NO_RDMA, OK, "tcp"),
        (Measured(UNKNOWN_LANE, MIB, (1e9,)), False, NO_RDMA, WARN, "unknown, 1 GB/s"),
        (Measured(UNKNOWN_LANE, MIB, (1e9,)), True, NO_RDMA, FAIL, "not ready"),
    ],
)
def test_a_lane_against_what_is_required(
    measured: Measured, required: bool, machine: Devices, level: Level, words: str
) -> None:
    found = judged("lane", measured, needs(require_rdma=required), machine)
    assert (found.level, found.found.startswith(words)) == (level, True), found
