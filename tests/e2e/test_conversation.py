"""A conversation with real processes is, bit for bit, that of one process which keeps its cache: nothing is computed
twice, on either node, and what decode made comes back to prefill."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import torch

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.monolith import Monolith
from pdkv.cli.assemble import contract_of, drafter_of, model_of
from pdkv.cli.demo.asks import text_tokens
from pdkv.config import PrefillConfig
from pdkv.geometry.page_layout import page_format
from pdkv.ids import RequestId
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Token
from tests.e2e.world import CHUNK, World, at_rest, free_address

DRAFTS = {"speculation": "mtp", "draft_tokens": 2, "index_sharing": True}
SAMPLINGS = (Sampling(20), Sampling(20, temperature=0.8, top_p=0.95, seed=1), Sampling(10))
"""Of three turns; with the prompts below each answer fills a page."""


def one_process() -> Monolith:
    config = PrefillConfig(model="tiny", threads=1, **DRAFTS)  # type: ignore[arg-type]
    torch.set_num_threads(1)  # as the nodes do: another number rounds otherwise
    model = model_of(config)
    fmt = page_format(model.shape)
    pool = SlotPool.create(fmt, 100)
    contract, engine = contract_of(config, model, fmt), ReferenceEngine(model, pool)
    made = Monolith(engine, pool, contract, CHUNK, drafter_of(config, contract, model, engine))
    made.caches_answers = True
    return made


def test_each_turn_goes_on_from_the_answer_before_it_bit_for_bit(world: World) -> None:
    """With the draft layer, whose rows of the answer's pages must be the final ones."""

    async def body() -> None:
        address = free_address()
        prefill, decode = await asyncio.gather(
            world.start("prefill", "talk-p", bind=address, **DRAFTS),
            world.start("decode", "talk-d", prefill_addresses=address, **DRAFTS),
        )
        one, tokens, pulled = one_process(), text_tokens(9900, 630), 0
        for turn, sampling in enumerate(SAMPLINGS):
            asked = replace(world.request(0, 1, prefill), tokens=tokens, request_id=RequestId(f"turn-{turn}"))
            said, done = await heard(world, decode, replace(asked, sampling=sampling))
            alone = one.generate(tokens, sampling)
            assert tuple(token.token for token in said) == alone.tokens
            assert tuple(token.logits_digest for token in said) == alone.logits_digests
            assert tuple(token.draft_digests for token in said) == alone.draft_digests
            # neither node computed a page that the other one had
            assert (done.shipment.pages_hit, done.chunk_starts) == (alone.pages_hit, alone.chunk_starts)
            assert done.chunk_starts[0] == done.shipment.pages_hit * 64
            assert (done.shipment.pages_pulled_back > 0) == (turn > 0)
            pulled += done.shipment.pages_pulled_back
            tokens = np.concatenate((tokens, np.array(alone.tokens), text_tokens(turn, 110))).astype(np.uint32)
        status = await world.nodes.decode(decode.address).status()
        assert at_rest(status)
        assert status.pages["cached"] == 14
        status = await world.prefill_status(prefill)
        assert at_rest(status)
        assert (status.borrowed_pages, status.borrow_failures) == (pulled, {})

    world.run(body())


async def heard(world: World, node: object, asked: GenerateRequest) -> tuple[list[Token], GenerateDone]:
    events = [event async for event in world.service(node).generate(asked)]  # type: ignore[arg-type]
    done = events.pop()
    assert isinstance(done, GenerateDone)
    return [event for event in events if isinstance(event, Token)], done
