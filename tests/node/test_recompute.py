"""A prompt that the decode node computes itself: the tokens of one process, whatever had come before."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, ClassVar

import pytest

from pdkv.adapters.reference.monolith import Monolith
from pdkv.errors import BadLogits, PeerLost
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import FailurePolicy, Token
from pdkv.node.recompute import chunks
from pdkv.node.stages import Stage
from tests.node.grouped import Port, Scene, first_rank
from tests.node.grouped import run as run_group
from tests.node.scene import alone, answers, request
from tests.node.toy import ToyEngine, toy_drafter
from tests.node.trio import Trio, play


def lost(length: int, **more: Any) -> Any:
    """A request whose only prefill node will be lost."""
    return request(length, prefill_address="p0", on_failure=FailurePolicy.RECOMPUTE, **more)


def test_chunks_cover_what_is_left() -> None:
    assert chunks(128, 300, 128) == [slice(128, 256), slice(256, 300)]
    assert chunks(0, 128, 128) == [slice(0, 128)]


SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "drop_page": {"speculation": "eagle", "eagle_rule": "drop_page", "rollback_tokens": 4},
    "oracle": {"speculation": "oracle", "rollback_tokens": 3, "draft_tokens": 3},
    "mtp": {"speculation": "mtp", "eagle_rule": "bigram", "rollback_tokens": 2, "draft_tokens": 2, "draft_topk": 2},
}


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("length", [1, 64, 128, 129, 300, 320])
def test_it_gives_what_one_process_gives(length: int, speculation: str) -> None:
    async def scenario(trio: Trio) -> None:
        trio.wires[0].die()
        tokens, done = await answers(trio.decode.generate(lost(length)))
        assert tuple(tokens) == alone(trio.pair, lost(length))
        assert (done.recomputed_tokens, done.chunk_starts) == (length, tuple(range(0, length, 128)))
        assert (done.shipment.pages_shipped, done.shipment.pages_total) == (0, -(-length // 64))
        await trio.rested()
        # What it computed is cache like any other: the second time only what must be computed is.
        tokens, done = await answers(trio.decode.generate(lost(length, name="again")))
        assert tuple(tokens) == alone(trio.pair, lost(length))
        assert 1 <= done.recomputed_tokens <= 3 * 64
        await trio.rested()

    play(scenario, **SPECULATION[speculation])


@pytest.mark.parametrize("speculation", SPECULATION)
def test_it_goes_on_from_what_was_verified(speculation: str) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        tokens, done = await answers(trio.decode.generate(lost(300)))
        assert tuple(tokens) == alone(trio.pair, lost(300))
        kept = 1 if speculation == "drop_page" else 2  # the rule gives the last one back, as prefill would
        assert done.recomputed_tokens == 300 - kept * 64
        await trio.rested()

    play(scenario, **SPECULATION[speculation])


def test_its_draft_state_is_that_of_one_process() -> None:
    """Tokens don't see it: the logits of every draft are compared."""

    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        asked = lost(300, want_logits=True)
        async with aclosing(trio.decode.generate(asked)) as events:
            said = [event async for event in events if isinstance(event, Token)]
        fmt, contract = trio.decode.parts.pool.fmt, trio.decode.parts.contract
        pool = SlotPool.create(fmt, 64)
        engine = ToyEngine(pool)
        process = Monolith(engine, pool, contract, 128, toy_drafter(engine, contract))
        expected = process.generate(asked.tokens, asked.sampling)
        assert tuple(token.draft_digests for token in said) == expected.draft_digests
        assert any(token.draft_digests for token in said)
        assert tuple(token.logits_digest for token in said) == expected.logits_digests
        await trio.rested()

    play(scenario, **SPECULATION["mtp"])


def test_an_engine_that_fails_ends_the_request() -> None:
    async def scenario(trio: Trio) -> None:
        trio.wires[0].die()
        trio.decode.parts.engine.change = lambda logits: logits * float("nan")  # type: ignore[attr-defined]
        with pytest.raises(BadLogits):
            await answers(trio.decode.generate(lost(300)))
        await trio.rested()
        assert trio.decode.parts.manager.census()["cached"] == 0

    play(scenario)


class Watching(Port):
    """A rank, and the steps that it is told to compute."""

    steps: ClassVar[list[tuple[int, int]]] = []

    async def step(self, step: Any) -> int:
        self.steps.append((step.start, len(step.tokens)))
        return await self.rank.step(step)


def test_in_a_group_every_rank_computes_and_commits() -> None:
    Watching.steps.clear()

    async def scenario(scene: Scene) -> None:
        asked = request(300, on_failure=FailurePolicy.RECOMPUTE)
        peers = scene.pair.directory.peers
        node = peers.pop("p0")
        peers["p0"] = Gone()
        assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)
        assert Watching.steps[:1] == [(0, 300)]
        await scene.rested()
        peers["p0"] = node

    run_group(scenario, between=first_rank(Watching))


class Gone:
    async def connect(self, intro: object) -> object:
        raise PeerLost("nobody there")
