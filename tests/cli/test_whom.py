"""Who is there, and why it doesn't serve, in an error's words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdkv.cli.whom import known_as, wait_for, why_not
from pdkv.errors import CapacityError, ConfigError, DeadlineExceeded
from pdkv.node.routing import RouterStatus
from pdkv.rpc.security import PlainText
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, Stream, collect, run, serving


def test_a_router_says_which_nodes_it_knows_and_why_they_are_down() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (server, directory):
            await server.set_serving(serving=False)
            with pytest.raises(DeadlineExceeded) as late:
                await wait_for(directory, server.address, PlainText(), 0.1)
            assert str(late.value).endswith("it answers NOT_SERVING: it knows prefill a:1 is up, decode b:2 is up")
            waiting = asyncio.create_task(wait_for(directory, server.address, PlainText(), 30.0))
            await server.set_serving(serving=True)
            await waiting

    run(body)


def test_nobody_there_is_said_as_it_was() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (_, directory):
            with pytest.raises(DeadlineExceeded, match=r"waiting for 127\.0\.0\.1:1 to serve"):
                await wait_for(directory, "127.0.0.1:1", PlainText(), 0.1)

    run(body)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RouterStatus({}, {}, 0), "it knows nobody"),
        (RouterStatus({"a:1": "PeerLost: gone"}, {}, 0), "it knows prefill a:1 is PeerLost: gone; no decode node"),
        (replace(samples.status("decode"), unready="no rank"), "no rank"),
        (replace(samples.status("decode"), unready=""), "it is ready by now"),
    ],
)
def test_why_it_does_not_serve(status: RouterStatus, words: str) -> None:
    assert why_not(status) == words


def test_another_service_than_was_meant_is_named_with_the_way_out() -> None:
    async def body() -> None:
        stream = Stream(samples.TOKEN, samples.GENERATE_DONE)
        for there, words in (
            ({"prefill": FakePrefill()}, "a router; a prefill node answers there, which is asked over a decode node"),
            ({"decode": FakeDecode(stream)}, "a router; a decode node answers there; --decode is for it"),
        ):
            async with serving(**there) as (server, directory):  # type: ignore[arg-type]
                with pytest.raises(ConfigError, match=words) as wrong:
                    async with known_as(directory, server.address, "--router"):
                        await collect(directory.router(server.address).generate(samples.generate_request()))
                assert wrong.value.fields["field"] == "--router"

    run(body)


def test_what_the_right_service_says_is_left_alone() -> None:
    async def body() -> None:
        full = FakeRouter(Stream(error=CapacityError("full")))
        async with serving(router=full) as (server, directory):
            with pytest.raises(CapacityError, match="full"):
                async with known_as(directory, server.address, "--router"):
                    await collect(directory.router(server.address).generate(samples.generate_request()))

    run(body)
