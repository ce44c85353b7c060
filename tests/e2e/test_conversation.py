"""A conversation with real processes: each turn hits the answer before it, and is computed on as one process would."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from pdkv.cli.assemble import contract_of, model_of
from pdkv.cli.demo.asks import text_tokens
from pdkv.config import PrefillConfig
from pdkv.geometry.page_layout import page_format
from pdkv.ids import RequestId
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Token
from tests.adapters.reference.replayed import Replayed
from tests.e2e.world import World, at_rest, free_address

DRAFTS = {"speculation": "mtp", "draft_tokens": 2, "index_sharing": True}
SAMPLINGS = (Sampling(20), Sampling(20, temperature=0.8, top_p=0.95, seed=1), Sampling(10))
"""Of three turns; with the prompts below each answer fills a page."""


def test_each_turn_hits_the_answer_before_it_and_goes_on_bit_for_bit(world: World) -> None:
    """With the draft layer, whose rows of the answer's pages must be the final ones."""

    async def body() -> None:
        address = free_address()
        prefill, decode = await asyncio.gather(
            world.start("prefill", "talk-p", bind=address, **DRAFTS),
            world.start("decode", "talk-d", prefill_addresses=address, **DRAFTS),
        )
        config = PrefillConfig(model="tiny", threads=1, **DRAFTS)  # type: ignore[arg-type]
        model = model_of(config)
        replayed = Replayed(config, contract_of(config, model, page_format(model.shape)), model)
        tokens, due = text_tokens(9900, 630), 0
        for turn, sampling in enumerate(SAMPLINGS):
            asked = replace(world.request(0, 1, prefill), tokens=tokens, request_id=RequestId(f"turn-{turn}"))
            said, done = await heard(world, decode, replace(asked, sampling=sampling))
            assert done.shipment.pages_hit == due
            again = replayed.answer(tokens, sampling, done.chunk_starts, due)
            assert [replace(t, logprob=0) for t in said] == [replace(t, logprob=0) for t in again]
            due = (len(tokens) + len(said) - 1) // 64
            tokens = np.concatenate((tokens, np.array([t.token for t in said]), text_tokens(turn, 110)))
            tokens = tokens.astype(np.uint32)
        assert due == 14
        status = await world.nodes.decode(decode.address).status()
        assert at_rest(status)
        assert status.pages["cached"] == due
        # prefill has no answer's page of its own: it computed what it lacked, from where its last prompt ended
        assert done.chunk_starts[0] < done.shipment.pages_hit * 64

    world.run(body())


async def heard(world: World, node: object, asked: GenerateRequest) -> tuple[list[Token], GenerateDone]:
    events = [event async for event in world.service(node).generate(asked)]  # type: ignore[arg-type]
    done = events.pop()
    assert isinstance(done, GenerateDone)
    return [event for event in events if isinstance(event, Token)], done
