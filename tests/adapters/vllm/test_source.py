"""A worker's blocks as other pdkv nodes see them, over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pdkv.errors import ContractMismatch, StalePages, WrongIncarnation
from pdkv.ids import PageHashes
from pdkv.node.base import Station
from pdkv.node.messages import Envelope, LeaseCall, LendCall, LocateCall
from pdkv.rpc.client import GrpcDirectory, GrpcSource
from pdkv.rpc.security import PlainText
from tests.adapters.vllm.engines import TOKENS, Engine, pair, prompt


def calling(scenario: Callable[[GrpcSource, Station, Engine], Awaitable[None]], lease_s: float = 60.0) -> None:
    """From the decode engine's station to the prefill engine's port."""
    with pair(find_s=0.2, lease_s=lease_s) as (p, d):

        async def main() -> None:
            directory = GrpcDirectory(PlainText())
            try:
                async with asyncio.timeout(20):
                    await scenario(directory.source(f"127.0.0.1:{p.settings.port}"), d.side.station, p)
            finally:
                await directory.close()

        asyncio.run(main())


def names(p: Engine, pages: int) -> PageHashes:
    return prompt(pages * TOKENS).names(p.side.contract.content_fingerprint, "", TOKENS)


def test_pages_are_located_lent_and_released() -> None:
    async def scenario(source: GrpcSource, me: Station, p: Engine) -> None:
        intro = await source.connect(me.intro())
        envelope = me.envelope(intro.name)
        assert await source.locate(LocateCall(envelope, names(p, 2))) == 0
        p.hold("r", prompt(2 * TOKENS), 4, 2)
        while await source.locate(LocateCall(envelope, names(p, 2))) != 2:
            pass  # it is being digested
        loan = await source.lend(LendCall(envelope, names(p, 2), 1))
        assert loan.pages.page_ids.tolist() == [2]
        await source.release_lease(LeaseCall(envelope, loan.lease.lease_id))
        assert p.until(lambda r: r.sent).sent == {"r"}
        with pytest.raises(StalePages):
            await source.lend(LendCall(envelope, names(p, 2), 1))

    calling(scenario)


def test_nobody_gets_anything_unmet_or_with_another_content() -> None:
    async def scenario(source: GrpcSource, me: Station, p: Engine) -> None:
        p.hold("r", prompt(TOKENS), 4)
        with pytest.raises(WrongIncarnation):
            await source.lend(LendCall(me.envelope(p.side.name), names(p, 1), 0))
        await source.connect(me.intro())
        other = Envelope(me.name, p.side.name, bytes(32))
        for call in (source.lend(LendCall(other, names(p, 1), 0)), source.locate(LocateCall(other, names(p, 1)))):
            with pytest.raises(ContractMismatch):
                await call

    calling(scenario)


def test_transfer_looks_out_for_readers_until_the_last_lease_is_over() -> None:
    """Also one that nobody releases."""

    async def scenario(source: GrpcSource, me: Station, p: Engine) -> None:
        told: list[bool] = []
        p.side.station.transfer.expect_reads = lambda *, peers_may: told.append(peers_may)  # type: ignore[method-assign]
        intro = await source.connect(me.intro())
        p.hold("r", prompt(TOKENS), 4)
        await source.lend(LendCall(me.envelope(intro.name), names(p, 1), 0))
        assert p.until(lambda r: r.sent).sent == {"r"}
        assert told == [True, False]

    calling(scenario, lease_s=0.2)
