"""Every stage of a request, every fault, every policy: it ends right or by name, and nothing stays behind anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdkv.errors import PdkvError, PeerLost, RemoteError
from pdkv.node.messages import FailurePolicy
from pdkv.node.stages import Stage
from tests.node.scene import LIMIT_S, alone, answers
from tests.node.trio import HASTY, Trio, ended, fallible, play, saved

BEFORE = (Stage.QUEUED, Stage.RESERVED, Stage.ASKED, Stage.LEASED)
"""Decode doesn't know yet that it was accepted: what fails here is a refusal."""
UNDER_WAY = (
    Stage.ACCEPTED,
    Stage.COMPUTING,
    Stage.SEALED,
    Stage.RENEWED,
    Stage.READING,
    Stage.ARRIVED,
    Stage.COMMITTED,
    Stage.DONE,
    Stage.PREFILLED,
)
AFTER = (Stage.ADMITTED, Stage.DECODING, Stage.RELEASED)
"""Prefill is not needed any more."""
ON_DECODE = [stage for stage in Stage if stage.startswith("decode.") and stage not in (Stage.RECOMPUTING, Stage.LENT)]
"""Those that a request reaches where nothing fails and nobody lends."""
ON_PREFILL = [stage for stage in Stage if stage.startswith("prefill.") and stage not in (Stage.PULLING, Stage.PULLED)]
"""Those that a conversation's first turn reaches; for the others see `test_pull_back`."""


async def checked(trio: Trio, stage: Stage, policy: FailurePolicy, outcome: Any) -> None:
    """What has to come of a prefill node that is lost at that stage."""
    if stage in UNDER_WAY:
        if policy is FailurePolicy.FAIL:
            assert isinstance(outcome, PdkvError)
            assert outcome.fields["accepted_by"] == "p0"
        else:
            await saved(trio, outcome, policy)
    else:
        tokens, done = outcome
        assert tuple(tokens) == alone(trio.pair, fallible(policy))
        assert (done.retries, done.recomputed_tokens) == (0, 0)
        assert len(trio.wires[1].asked) == (stage in BEFORE)
    await trio.rested()


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("stage", [*BEFORE, *UNDER_WAY, *AFTER])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_prefill_node_that_is_lost(how: str, stage: Stage, policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        wire = trio.wires[0]
        if how == "hangs" and stage is Stage.READING:  # the read that is posted then must not have ended
            trio.at[Stage.ACCEPTED] = lambda: trio.net.stopped.add(str(wire.node.parts.name))
        trio.on(stage, wire.die if how == "dies" else wire.stop)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy)))))
        assert stage not in trio.at
        if isinstance(outcome, PdkvError):
            assert isinstance(outcome, PeerLost)
            assert ("not heard of" in str(outcome)) == (how == "hangs")
        await checked(trio, stage, policy, outcome)

    play(scenario, settings=HASTY if how == "hangs" else None)


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("stage", [*UNDER_WAY, Stage.LEASED])
def test_a_lease_that_is_lost(stage: Stage, policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(stage, trio.wires[0].lose_leases)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy)))))
        assert stage not in trio.at
        if isinstance(outcome, PdkvError):
            assert policy is FailurePolicy.FAIL
            assert outcome.fields["accepted_by"] == "p0"
        else:
            tokens, done = outcome
            assert tuple(tokens) == alone(trio.pair, fallible(policy))
            # late losses may go unnoticed: everything had been read
            assert stage in (Stage.DONE, Stage.PREFILLED) or done.retries or done.recomputed_tokens
        await trio.rested()

    play(scenario)


def explode() -> None:
    raise RuntimeError("a step broke")


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("stage", ON_DECODE)
def test_an_error_of_the_decode_node_itself_ends_the_request_under_every_policy(
    stage: Stage, policy: FailurePolicy
) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(stage, explode)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy)))))
        assert isinstance(outcome, RuntimeError)
        assert not trio.wires[1].asked
        await trio.rested()

    play(scenario)


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("stage", [s for s in ON_PREFILL if s is not Stage.RELEASED])
def test_an_error_of_the_prefill_node_is_one_of_its_failures(stage: Stage, policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(stage, explode)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy)))))
        if isinstance(outcome, PdkvError):
            assert isinstance(outcome, RemoteError)
        await checked(trio, stage, policy, outcome)

    play(scenario)


@pytest.mark.parametrize("policy", [FailurePolicy.RETRY])
@pytest.mark.parametrize("stage", [*BEFORE, *UNDER_WAY, Stage.ADMITTED, Stage.DECODING])
def test_a_client_that_goes(stage: Stage, policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        asking = asyncio.create_task(answers(trio.decode.generate(fallible(policy))))
        trio.on(stage, asking.cancel)
        assert await ended(asking) is None
        assert asking.cancelled()
        assert not trio.wires[1].asked
        await trio.rested()

    play(scenario)


@pytest.mark.parametrize("how", ["client", "own error"])
def test_the_end_while_the_decode_node_computes_itself(how: str) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        asking = asyncio.create_task(answers(trio.decode.generate(fallible(FailurePolicy.RECOMPUTE))))
        trio.on(Stage.RECOMPUTING, explode if how == "own error" else asking.cancel)
        outcome = await ended(asking)
        assert asking.cancelled() if how == "client" else isinstance(outcome, RuntimeError)
        await trio.rested()

    play(scenario)


def test_pages_of_a_read_that_was_just_posted_are_held_back_when_the_node_itself_fails() -> None:
    async def scenario(trio: Trio) -> None:
        net = trio.net

        def posted() -> None:
            assert net.posted.wait(LIMIT_S)
            explode()

        def stop_reads() -> None:
            net.stopped.add(str(trio.wires[0].node.parts.name))
            net.posted.clear()

        trio.on(Stage.ACCEPTED, stop_reads)
        trio.on(Stage.READING, posted)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(None)))))
        assert isinstance(outcome, RuntimeError)
        assert trio.decode.parts.manager.census()["quarantined"] >= 2
        await trio.rested()

    play(scenario)
