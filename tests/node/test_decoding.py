"""Requests that give their pages to others while they decode, and say the same tokens as if nobody had come."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import DigestMismatch
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Token
from pdkv.node.preemption import MAX_PREEMPTIONS, Preemption, PreemptPolicy
from tests.node import grouped
from tests.node.pooled import Pooling, pooled_alone, pooled_pair
from tests.node.scene import Gate, alone, answers, gated, recovered, request, rested, run, turns, until
from tests.node.test_speculation import MTP, ORACLE, in_one_process
from tests.node.toy import Pair, make_pair

POLICIES = (PreemptPolicy.OFFLOAD, PreemptPolicy.RECOMPUTE)
GREEDY = Sampling(max_tokens=70)
SEEDED = Sampling(max_tokens=70, temperature=0.8, top_p=0.9, seed=5)


def tight(policy: PreemptPolicy, *, pages: int = 12, **more: Any) -> Pair:
    """Eleven usable pages on decode."""
    settings = DecodeSettings(prefill_addresses=("p0",), preempt=policy, **more.pop("settings", {}))
    return make_pair(pages=pages, prefill_pages=64, settings=settings, **more)


def long_request(name: str, seed: int, sampling: Sampling, length: int = 300) -> GenerateRequest:
    return replace(request(length, seed=seed, name=name), sampling=sampling)


class Listening:
    """A request that is answered, as far as it has come."""

    def __init__(self, pair: Pair, asked: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.draft_digests: list[tuple[int, ...]] = []
        self.done: GenerateDone | None = None
        self.asked = asked
        self.task = asyncio.create_task(self._listen(pair))

    async def _listen(self, pair: Pair) -> None:
        async with aclosing(pair.decode.generate(self.asked)) as events:
            async for event in events:
                if isinstance(event, Token):
                    self.tokens.append(event.token)
                    self.draft_digests.append(event.draft_digests)
                else:
                    self.done = event

    async def end(self, pair: Pair) -> GenerateDone:
        await self.task
        assert tuple(self.tokens) == alone(pair, self.asked)
        assert self.done is not None
        return self.done


def held_at(pair: Pair, step: int) -> Gate:
    """The decode node's engine waits there."""
    return gated(pair.decode.parts.engine, "forward", at=step)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [300, 320, 40])
def test_a_request_that_gave_way_says_what_it_would_have_said(
    policy: PreemptPolicy, sampling: Sampling, length: int
) -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 25)
        first = Listening(pair, long_request("first", 1, sampling, length))
        await gate.reached()
        held_before = pair.decode.parts.manager.census()["private"]
        second = Listening(pair, long_request("second", 2, sampling, 600))
        await until(lambda: pair.decode.status().queued)
        assert pair.decode.parts.manager.census()["private"] == held_before  # not amid a step
        gate.open()
        assert (await second.end(pair)).preemptions == 0
        assert (await first.end(pair)).preemptions == 1
        assert pair.decode.status().preemptions == 1
        assert pair.decode.preemption.store.used_bytes == 0
        await recovered(pair)

    run(scenario, tight(policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_its_prompt_is_still_there_if_nobody_took_it(policy: PreemptPolicy) -> None:
    """The one it gave way for needs less than everything: what stayed in the tree is not brought back again."""

    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, replace(GREEDY, max_tokens=2), 380))
        await until(lambda: pair.decode.status().queued)
        steps = pair.decode.parts.engine.steps  # type: ignore[attr-defined]
        gate.open()
        await second.end(pair)
        await first.end(pair)
        again = [step for step in steps if step[0] < 300]
        assert all(start >= 128 for start, _ in again)
        assert bool(again) == (policy is PreemptPolicy.RECOMPUTE)
        await recovered(pair)

    run(scenario, tight(policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("facts", [ORACLE, MTP], ids=["oracle", "mtp"])
def test_with_drafts_too_and_those_are_the_same(policy: PreemptPolicy, facts: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.engine, "verify", at=5)
        first = Listening(pair, replace(long_request("first", 1, SEEDED), want_logits=True))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, GREEDY, 560))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await second.end(pair)
        done = await first.end(pair)
        assert done.preemptions == 1
        (undisturbed,) = in_one_process(pair, first.asked)
        assert tuple(first.draft_digests) == undisturbed.draft_digests
        assert done.speculation == undisturbed.speculation
        await recovered(pair)

    run(scenario, tight(policy, both=facts))


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_of_an_open_window_come_back_too(policy: PreemptPolicy) -> None:
    """With a pooled index a page holds keys that no index row stands for yet."""

    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 6)
        first = long_request("first", 1, Sampling(max_tokens=20), 1300)
        second = long_request("second", 2, Sampling(max_tokens=4), 1600)
        running = asyncio.create_task(answers(pair.decode.generate(first)))
        await gate.reached()
        coming = asyncio.create_task(answers(pair.decode.generate(second)))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        tokens, _ = await coming
        assert tuple(tokens) == pooled_alone(pair, second)
        tokens, done = await running
        assert (tuple(tokens), done.preemptions) == (pooled_alone(pair, first), 1)
        await rested(pair)

    pair = pooled_pair(Pooling(4))
    pair.decode = DecodeNode(pair.decode.parts, pair.directory, DecodeSettings(("p0",), preempt=policy))
    run(scenario, pair)


def test_a_group_computes_again_on_every_rank() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        node = scene.pair.decode
        node.preemption = Preemption(node.parts, node.queue, PreemptPolicy.RECOMPUTE, 0)
        gate = gated(scene.parts[0].engine, "forward", at=8)
        first = Listening(scene.pair, long_request("first", 1, SEEDED))
        await gate.reached()
        second = Listening(scene.pair, long_request("second", 2, replace(GREEDY, max_tokens=4), 600))
        await until(lambda: node.status().queued)
        gate.open()
        await second.end(scene.pair)
        assert (await first.end(scene.pair)).preemptions == 1
        await scene.rested()

    grouped.run(scenario, pages=12)


def test_many_requests_on_a_pool_for_two_all_say_the_right_tokens() -> None:
    async def scenario(pair: Pair) -> None:
        random = np.random.default_rng(3)
        asked = [
            long_request(f"r{i}", i % 4, GREEDY if i % 2 else SEEDED, int(random.integers(30, 400))) for i in range(6)
        ]
        running = [Listening(pair, each) for each in asked]
        ends = [await each.end(pair) for each in running]
        assert pair.decode.status().preemptions == sum(done.preemptions for done in ends) > 0
        assert max(done.preemptions for done in ends) <= MAX_PREEMPTIONS
        await recovered(pair)

    for policy in POLICIES:
        run(scenario, tight(policy))


def test_without_a_policy_nobody_gives_way() -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        assert (await first.end(pair)).preemptions == 0
        await second.end(pair)
        await recovered(pair)

    run(scenario, tight(PreemptPolicy.NONE))


def test_a_request_keeps_its_pages_if_host_memory_has_no_room_for_them() -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await first.end(pair)
        await second.end(pair)
        assert pair.decode.status().preemptions == 0
        await recovered(pair)

    run(scenario, tight(PreemptPolicy.OFFLOAD, settings={"offload_bytes": 1000}))


def test_nobody_gives_way_for_one_that_has_gone() -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        second.task.cancel()
        await asyncio.wait([second.task])
        gate.open()
        assert (await first.end(pair)).preemptions == 0
        await recovered(pair)

    run(scenario, tight(PreemptPolicy.OFFLOAD))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_is_given_up_while_it_waits_again_leaves_nothing(policy: PreemptPolicy) -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await until(lambda: pair.decode.status().preemptions)
        first.task.cancel()
        await asyncio.wait([first.task])
        await second.end(pair)
        assert pair.decode.preemption.store.used_bytes == 0
        await recovered(pair)

    run(scenario, tight(policy))


def test_one_that_is_given_up_while_its_pages_are_copied_leaves_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        copying = gated(pair.decode.preemption.store, "save")
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await copying.reached()
        first.task.cancel()
        await turns()
        copying.open()
        await asyncio.wait([first.task])
        await second.end(pair)
        assert pair.decode.preemption.store.used_bytes == 0
        await recovered(pair)

    run(scenario, tight(PreemptPolicy.OFFLOAD))


@pytest.mark.parametrize("group", [0, 1])
def test_bytes_that_host_memory_lost_end_the_request_before_a_wrong_token(group: int) -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        store = pair.decode.preemption.store
        save = store.save

        def lossy(*args: Any) -> Any:
            copy = save(*args)
            copy.rows[group][-1, 0] ^= 1
            return copy

        store.save = lossy  # type: ignore[assignment, method-assign]
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await second.end(pair)
        with pytest.raises(DigestMismatch, match=("main", "index")[group]):
            await first.task
        assert tuple(first.tokens) == alone(pair, first.asked)[: len(first.tokens)]
        await recovered(pair)

    run(scenario, tight(PreemptPolicy.OFFLOAD))


def test_a_finished_request_is_answered_whole() -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(150)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert (done.finish_reason, done.output_tokens, done.preemptions) == ("length", 8, 0)

    run(scenario, make_pair())
