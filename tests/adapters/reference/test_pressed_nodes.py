"""Two nodes with the reference engine, and a decode pool that is too small: tokens and logits of one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.monolith import Monolith
from pdkv.contract import ContractFacts
from pdkv.geometry.page_layout import page_format
from pdkv.kvcache.pool import SlotPool
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Token
from pdkv.node.preemption import PreemptPolicy
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.transfer.backends.loopback import LoopbackNet
from tests.node.scene import gated, request, rested, run, until
from tests.node.toy import CHUNK, OneByOne, Pair, make_parts

FACTS = ContractFacts(weights_id="tiny")
SAMPLED = Sampling(max_tokens=30, temperature=0.8, top_p=0.95, seed=3)


def reference_pair(model: LoadedModel, pages: int, policy: PreemptPolicy) -> Pair:
    net = LoopbackNet()
    made = [make_parts(name, FACTS, net, pages=count) for name, count in (("p0", 40), ("d0", pages))]
    prefill, decode = (replace(parts, engine=ReferenceEngine(model, parts.pool)) for parts in made)
    node = PrefillNode(prefill, PrefillSettings(chunk_tokens=CHUNK))
    directory = OneByOne({"p0": node})
    settings = DecodeSettings(prefill_addresses=("p0",), preempt=policy)
    return Pair(node, DecodeNode(decode, directory, settings), net, directory)


def alone(model: LoadedModel, pair: Pair, asked: GenerateRequest) -> list[tuple[int, int]]:
    pool = SlotPool.create(page_format(model.shape), 40)
    answer = Monolith(ReferenceEngine(model, pool), pool, pair.prefill.parts.contract, CHUNK).generate(
        asked.tokens, asked.sampling
    )
    return list(zip(answer.tokens, answer.logits_digests, strict=True))


async def heard(pair: Pair, asked: GenerateRequest) -> tuple[list[tuple[int, int]], GenerateDone]:
    said: list[tuple[int, int]] = []
    async for event in pair.decode.generate(asked):
        if isinstance(event, GenerateDone):
            done = event
        elif isinstance(event, Token):
            said.append((event.token, event.logits_digest))
    return said, done


@pytest.mark.parametrize("policy", [PreemptPolicy.OFFLOAD, PreemptPolicy.RECOMPUTE])
@pytest.mark.parametrize("length", [300, 256])
def test_a_request_that_gave_way_goes_on_bit_for_bit(tiny: LoadedModel, policy: PreemptPolicy, length: int) -> None:
    """The other one takes every page there is, so that nothing of the first one's is left in the tree."""

    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.engine, "forward", at=12)
        asked = replace(request(length, seed=1, name="first"), sampling=SAMPLED, want_logits=True)
        first = asyncio.create_task(heard(pair, asked))
        await gate.reached()
        other = replace(request(500, seed=2, name="second"), sampling=Sampling(max_tokens=8), want_logits=True)
        second = asyncio.create_task(heard(pair, other))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        said, done = await second
        assert (said, done.preemptions) == (alone(tiny, pair, other), 0)
        said, done = await first
        assert done.preemptions == 1
        assert said == alone(tiny, pair, asked)
        await rested(pair)

    run(scenario, reference_pair(tiny, 9, policy))


def test_a_prefix_that_was_evicted_is_shipped_again(tiny: LoadedModel) -> None:
    async def scenario(pair: Pair) -> None:
        asked = replace(request(300, seed=1, name="r"), sampling=Sampling(max_tokens=8))
        other = replace(request(400, seed=2, name="other"), sampling=Sampling(max_tokens=8))
        shipped = []
        for each in (asked, asked, other, asked):
            said, done = await heard(pair, each)
            assert [token for token, _ in said] == [token for token, _ in alone(tiny, pair, each)]
            shipped.append((done.shipment.pages_hit, done.shipment.pages_shipped))
        assert shipped[:3] == [(0, 5), (4, 1), (0, 7)]
        assert shipped[3][0] < 4
        assert sum(shipped[3]) == 5
        await rested(pair)

    run(scenario, reference_pair(tiny, 9, PreemptPolicy.NONE))
