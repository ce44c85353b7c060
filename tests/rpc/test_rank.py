"""A rank behind a real socket: it follows one leader, and the group it is of answers as one process."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pdkv.errors import ContractMismatch, IntegrityError, ProtocolError, WrongIncarnation
from pdkv.ids import LocalPages, PageHashes, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.group import lead
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, Joining, Op
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from pdkv.transfer.backends.loopback import LoopbackNet
from tests.node.grouped import FACTS
from tests.node.scene import LIMIT_S, alone, answers, request
from tests.node.toy import CHUNK, OneByOne, Pair, make_parts


def test_a_group_over_grpc_answers_as_one_process() -> None:
    async def main() -> None:
        net = LoopbackNet()
        prefill = PrefillNode(make_parts("p0", FACTS, net), PrefillSettings(chunk_tokens=CHUNK))
        rank = Rank(make_parts("d1", FACTS, net))
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(rank=rank), PlainText())
        address = await server.start()
        directory = GrpcDirectory(PlainText())
        async with asyncio.timeout(LIMIT_S):
            parts, group = await lead(make_parts("d0", FACTS, net), [directory.rank(address)])
            nodes = OneByOne({"p0": prefill})
            decode = DecodeNode(parts, nodes, DecodeSettings(prefill_addresses=("p0",)))
            pair = Pair(prefill, decode, net, nodes)
            for length in (1, 200, 300, 300):
                asked = request(length, seed=length)
                tokens, _ = await answers(decode.generate(asked))
                assert tuple(tokens) == alone(pair, asked)
            await group.barrier()
            assert rank.parts.manager.census() == parts.manager.census()
            await asyncio.gather(*decode.farewells)
        await group.close()
        await directory.close()
        await server.stop(0.0)
        pair.close()
        rank.parts.close()

    asyncio.run(main())


def test_a_rank_hears_only_its_leader() -> None:
    async def main() -> None:
        rank, other = (Rank(make_parts(name, FACTS, LoopbackNet())) for name in ("d1", "d2"))
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(rank=rank), PlainText())
        directory = GrpcDirectory(PlainText())
        address = await server.start()
        first, second = directory.rank(address), directory.rank(address)
        own, stranger = (Joining(parts.name, parts.contract, 64) for parts in (rank.parts, other.parts))
        with pytest.raises(WrongIncarnation, match="was not joined"):
            await first.apply(0, [])
        assert await first.join(own) == rank.parts.name
        with pytest.raises(ProtocolError, match="start it anew"):
            await second.join(stranger)
        second._leader = stranger.leader
        with pytest.raises(WrongIncarnation, match="follows d1"):
            await second.settled(1)
        with pytest.raises(ProtocolError, match="entry 3"):
            await first.apply(3, [])
        await first.cancel(5)
        await first.settled(5)
        pages = LocalPages.checked([1], 64)
        entry = Entry(Op.TAKE, ReservationId(1), pages.array)
        with pytest.raises(IntegrityError, match="no reservation 1"):
            await first.apply(0, [entry])
        arrival = Arrival(ReservationId(1), 0, pages, PageHashes(bytes(32)), np.zeros((1, 2), np.uint64))
        with pytest.raises(IntegrityError, match="no reservation 1"):
            await first.verify(arrival, 0)  # once out of step, it does nothing more
        await directory.close()
        await server.stop(0.0)
        for each in (rank, other):
            each.parts.close()

    asyncio.run(main())


def test_another_contract_is_refused_with_both_values() -> None:
    async def main() -> None:
        rank = Rank(make_parts("d1", FACTS, LoopbackNet()))
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(rank=rank), PlainText())
        directory = GrpcDirectory(PlainText())
        contract = rank.parts.contract
        port = directory.rank(await server.start())
        wrong = type(contract).from_dict({**contract.to_dict(), "weights_id": "other"})
        with pytest.raises(ContractMismatch) as error:
            await port.join(Joining(rank.parts.name, wrong, 64))
        assert [(d.field, d.theirs) for d in error.value.differences] == [("weights_id", "other")]
        await directory.close()
        await server.stop(0.0)
        rank.parts.close()

    asyncio.run(main())
