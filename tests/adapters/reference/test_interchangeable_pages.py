"""Why an answer under load may differ from one process's: pages that were computed in other shapes, nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.monolith import Monolith
from pdkv.contract import Contract
from pdkv.geometry.page_layout import page_format
from pdkv.ids import RequestId
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.node.preemption import PreemptPolicy
from tests.adapters.reference.recorded import Copy, History, Record, Span, done_again
from tests.adapters.reference.test_pressed_nodes import heard, reference_pair
from tests.node.scene import request, rested, run
from tests.node.toy import CHUNK, Pair

REQUESTS = 7
AT_ONCE = 4
DECODE_PAGES = 10
"""With the write sink: room for one or two requests, and hardly for what they leave."""


def asked_for() -> list[GenerateRequest]:
    """Beginnings of two texts with ends of their own, so that no prompt is the beginning of another."""
    random = np.random.default_rng(5)
    made = []
    for number in range(REQUESTS):
        text = request(300, seed=number % 2).tokens[: random.integers(70, 300)]
        own = random.integers(0, 256, int(random.integers(3, 50)))
        sampling = Sampling(16) if number % 3 else Sampling(16, temperature=0.8, top_p=0.95, seed=number)
        tokens = np.concatenate((text, own)).astype(np.uint32)
        made.append(GenerateRequest(RequestId(f"r{number}"), tokens, sampling, want_logits=True))
    return made


@dataclass
class Load:
    """What was asked and answered under load, and the record of it."""

    asked: list[GenerateRequest]
    record: Record = field(default_factory=Record)
    said: list[list[tuple[int, int]]] = field(default_factory=list)
    preemptions: int = 0
    contract: Contract | None = None


def loaded(model: LoadedModel) -> Load:
    load = Load(asked_for())

    async def scenario(pair: Pair) -> None:
        load.record.watch(pair)
        load.contract = pair.prefill.parts.contract
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(asked: GenerateRequest) -> list[tuple[int, int]]:
            async with gate:
                said, _ = await heard(pair, asked)
            return said

        load.said = await asyncio.gather(*map(one, load.asked))
        load.preemptions = pair.decode.status().preemptions
        await rested(pair)

    run(scenario, reference_pair(model, DECODE_PAGES, PreemptPolicy.OFFLOAD))
    return load


def cold_spans(prompt_tokens: int, stop: int) -> list[Span]:
    """Of each position of a request that hits nothing: prefill's chunks, then token by token."""
    chunks = [(at // CHUNK * CHUNK, min(at // CHUNK * CHUNK + CHUNK, prompt_tokens)) for at in range(prompt_tokens)]
    return chunks + [(at, at + 1) for at in range(prompt_tokens, stop)]


def shapes(load: Load) -> list[bool]:
    """For each request: a step read rows that were computed in other shapes than those of one process.

    Whatever the shapes, the tokens behind each step must be the request's.
    """
    texts = [np.append(a.tokens, [t for t, _ in said]).tolist() for a, said in zip(load.asked, load.said, strict=True)]
    history, other, steps = History.of(load.record.pages), [False] * len(texts), [0] * len(texts)
    for event in load.record.events:
        if isinstance(event, Copy):
            history.copy(event)
            continue
        history.write(event)
        tokens, spans = history.behind(event)
        of = [number for number, text in enumerate(texts) if text[: event.stop] == tokens]
        assert of, event
        for number in of:
            length = len(load.asked[number].tokens)
            if event.stop >= length:  # so it is this one's: no prompt is the beginning of another
                steps[number] += 1
                other[number] |= spans != cold_spans(length, event.stop)
    # the last chunk of the prompt, then a step a token, the last one's row left out
    assert steps == [len(said) for said in load.said]
    return other


def answered_cold(model: LoadedModel, load: Load, asked: GenerateRequest) -> list[tuple[int, int]]:
    pool = SlotPool.create(page_format(model.shape), 8)
    assert load.contract is not None
    answer = Monolith(ReferenceEngine(model, pool), pool, load.contract, CHUNK).generate(asked.tokens, asked.sampling)
    return list(zip(answer.tokens, answer.logits_digests, strict=True))


def test_under_load_answers_differ_by_shapes_of_steps_and_by_nothing_else(tiny: LoadedModel) -> None:
    load = loaded(tiny)
    assert load.preemptions > 0
    # Every step, of either node, is the same again from these very shapes: no read, no offload, no eviction, and none
    # of the requests beside it has changed a byte that it read.
    assert done_again(load.record, tiny) == []
    of_others = cold = other_logits = other_tokens = 0
    seen = shapes(load)
    for number, asked in enumerate(load.asked):
        said, alone = load.said[number], answered_cold(tiny, load, asked)
        assert len(said) == len(alone)
        if seen[number]:
            of_others += 1
            other_logits += said != alone
            other_tokens += [token for token, _ in said] != [token for token, _ in alone]
        else:
            cold += 1
            assert said == alone, "in the shapes of one process it is one process's, bit for bit"
    print(f"{other_tokens} answers and {other_logits} logits of {of_others} differ; {cold} in one process's shapes")
    assert cold > 0
    assert other_logits > 0


def test_control_one_bit_that_came_back_otherwise_is_found(tiny: LoadedModel) -> None:
    load = Load(asked_for()[:1])

    async def scenario(pair: Pair) -> None:
        load.record.watch(pair)
        await heard(pair, load.asked[0])

    run(scenario, reference_pair(tiny, DECODE_PAGES, PreemptPolicy.OFFLOAD))

    def damaged(pool: SlotPool, copy: Copy) -> None:
        pool.main_view(0)[int(copy.target[0]), 0, 0] ^= 1

    assert done_again(load.record, tiny) == []
    found = done_again(load.record, tiny, damaged)
    assert len(found) > 10
    assert all(step.decodes for step in found)
