"""Whoever asked a router has enough of an answer: its decode node is told."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from pdkv.errors import UnknownRequest
from tests.router.test_service import DONE, Nodes, router
from tests.rpc import samples
from tests.rpc.fakes import run


def test_who_has_enough_of_an_answer_is_told_on_to_its_decode_node() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, _ = router(nodes)
        asked = samples.generate_request()
        with pytest.raises(UnknownRequest, match="runs here that has a token"):
            await service.finish(asked.request_id, 1)
        async with aclosing(service.generate(asked)) as events:
            await anext(events)
            await service.finish(asked.request_id, 1)
            assert [event async for event in events] == DONE[1:]
        assert nodes.finished == [(nodes.asked[0][0], asked.request_id, 1)]
        with pytest.raises(UnknownRequest):
            await service.finish(asked.request_id, 1)

    run(body)


def test_of_two_with_one_id_the_younger_is_meant_and_the_older_ones_end_changes_nothing() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, _ = router(nodes, prefills=1)
        asked = samples.generate_request()
        async with aclosing(service.generate(asked)) as younger:
            async with aclosing(service.generate(asked)) as older:
                await anext(older)
                await anext(younger)
            await service.finish(asked.request_id, 1)
        ((address, _, _),) = nodes.finished
        assert address == nodes.asked[1][0] != nodes.asked[0][0]

    run(body)
