"""A decode group in one process: three ranks with pools and trees of their own, one of them the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdkv.contract import ContractFacts
from pdkv.geometry.page_layout import Group as Cache
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.group import Group, GroupSettings, lead
from pdkv.node.messages import GenerateRequest
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.rank import Rank
from pdkv.node.ranks import RankPort
from pdkv.transfer.backends.loopback import LoopbackNet
from tests.node.scene import LIMIT_S, answers, until
from tests.node.toy import CHUNK, OneByOne, Pair, make_parts

FACTS = ContractFacts(weights_id="toy")


@dataclass
class Scene:
    """Prefill node "p0", leader "d0", ranks "d1" and "d2"."""

    pair: Pair
    group: Group
    ranks: list[Rank]

    @property
    def parts(self) -> list[NodeParts]:
        """Of all ranks, the leader's first."""
        return [self.pair.decode.parts, *(rank.parts for rank in self.ranks)]

    async def ask(self, asked: GenerateRequest) -> list[int]:
        tokens, _ = await answers(self.pair.decode.generate(asked))
        return tokens

    async def rested(self) -> None:
        """Everything given back, on all ranks alike."""
        await until(lambda: self.parts[0].manager.census()["quarantined"] == 0)
        await self.group.barrier()
        self.same()
        for parts in self.parts:
            census = parts.manager.census()
            assert census["reserved"] + census["private"] + census["quarantined"] == 0, census
            assert not parts.manager.reservations
        assert not any(rank._reservations or rank._proofs or rank._reads for rank in self.ranks)

    def same(self) -> None:
        """Every page has the same state, hash and bytes on every rank."""
        first, *others = self.parts
        for parts in self.parts:
            parts.manager.check()
        for parts in others:
            assert parts.manager.census() == first.manager.census()
            rows, theirs = first.pool.table.rows, parts.pool.table.rows
            assert np.array_equal(rows["state"], theirs["state"])
            assert np.array_equal(rows["hash"], theirs["hash"])
            for page in np.flatnonzero(rows["state"]).tolist():
                for cache in Cache:
                    mine, other = (pool.group_bytes(page, cache) for pool in (first.pool, parts.pool))
                    assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))


Between = Callable[[Rank], RankPort]


def run(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    pages: int = 24,
    between: Between = lambda rank: rank,
    settings: GroupSettings | None = None,
) -> None:
    async def main() -> None:
        net = LoopbackNet()
        prefill = PrefillNode(make_parts("p0", FACTS, net), PrefillSettings(chunk_tokens=CHUNK))
        ranks = [Rank(make_parts(f"d{i}", FACTS, net, pages=pages)) for i in (1, 2)]
        ports = [between(rank) for rank in ranks]
        parts, group = await lead(make_parts("d0", FACTS, net, pages=pages), ports, settings)
        directory = OneByOne({"p0": prefill})
        own = DecodeSettings(prefill_addresses=("p0",), prefill_allow=("*",), allow_fault_injection=True)
        decode = DecodeNode(parts, directory, own)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(Scene(Pair(prefill, decode, net, directory), group, ranks))
                await asyncio.gather(*decode.farewells)
        finally:
            await group.close()
            for each in (prefill.parts, parts, *(rank.parts for rank in ranks)):
                each.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


class Port:
    """A rank whose calls a test can get in between of."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __getattr__(self, call: str) -> object:
        return getattr(self.rank, call)


def first_rank(kind: type[Port]) -> Between:
    def between(rank: Rank) -> RankPort:
        port: Any = kind(rank) if rank.parts.name.node == "d1" else rank
        return port  # type: ignore[no-any-return]

    return between
