"""Two nodes joined without a socket: what one process would give, and what happens when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import (
    BoundsError,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    LeaseExpired,
    NeverFits,
    PeerLost,
    ProtocolError,
)
from pdkv.ids import PageHashes, RequestId
from pdkv.node.decode import DecodeSettings
from pdkv.node.messages import (
    LeaseCall,
    PrefillEvent,
)
from tests.node.scene import (
    Meddler,
    alone,
    answers,
    gated,
    recovered,
    request,
    rested,
    run,
    until,
)
from tests.node.toy import CHUNK, Pair, make_pair

Change = Callable[[PrefillEvent], list[PrefillEvent]]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 500, 512])
def test_two_nodes_give_what_one_process_gives(length: int) -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(length)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        ship, fmt = done.shipment, pair.decode.parts.pool.fmt
        assert ship.pages_total == ship.pages_shipped == ship.digests_verified == -(-length // 64)
        assert ship.bytes_main == ship.pages_shipped * fmt.main_bytes
        assert ship.bytes_index == ship.pages_shipped * fmt.index_bytes
        assert ship.bytes_backend == ship.bytes_main + ship.bytes_index
        assert ship.bytes_tail == (fmt.page_bytes if length % 64 else 0)
        assert done.chunk_starts == tuple(range(0, length, CHUNK))
        await rested(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("rule", ["none", "bigram", "drop_page"])
def test_a_shared_prefix_ships_only_what_is_missing(rule: str) -> None:
    facts = {} if rule == "none" else {"speculation": "eagle", "eagle_rule": rule, "rollback_tokens": 4}

    async def scenario(pair: Pair) -> None:
        first = request(500)
        await answers(pair.decode.generate(first))
        longer = replace(first, request_id=RequestId("r1"), tokens=np.append(first.tokens, np.uint32(7)))
        tokens, done = await answers(pair.decode.generate(longer))
        assert tuple(tokens) == alone(pair, longer)
        assert done.shipment.pages_hit == (6 if rule == "drop_page" else 7)
        assert done.shipment.pages_hit + done.shipment.pages_shipped == 8
        await rested(pair)

    run(scenario, make_pair(both=facts))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [request(200 + 10 * i, seed=i, name=f"r{i}") for i in range(4)]
        got = await asyncio.gather(*(answers(pair.decode.generate(a)) for a in asked))
        assert [tuple(tokens) for tokens, _ in got] == [alone(pair, a) for a in asked]
        await rested(pair)

    run(scenario, make_pair())


def test_the_same_prompt_at_once_leaves_one_copy_in_the_tree() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [request(320, name=f"r{i}") for i in range(3)]
        got = await asyncio.gather(*(answers(pair.decode.generate(a)) for a in asked))
        assert {tuple(tokens) for tokens, _ in got} == {alone(pair, asked[0])}
        await rested(pair)
        for node in (pair.prefill, pair.decode):
            assert node.parts.manager.census()["cached"] == 5

    run(scenario, make_pair())


def test_unequal_contracts_are_refused_with_every_field_and_both_values() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ContractMismatch) as refused:
            await answers(pair.decode.generate(request(100)))
        assert [(d.field, d.mine, d.theirs) for d in refused.value.differences] == [
            ("weights_id", "other", "toy"),
            ("rollback_tokens", "4", "0"),
        ]
        await rested(pair)
        assert pair.prefill.parts.manager.census()["cached"] == 0

    run(scenario, make_pair(rollback_tokens=4, weights_id="other"))


def test_a_request_that_cannot_fit_leaves_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(NeverFits):
            await answers(pair.decode.generate(request(64 * 64)))
        with pytest.raises(BoundsError, match="vocabulary"):
            await answers(pair.decode.generate(replace(request(64), tokens=np.array([257], np.uint32))))
        with pytest.raises(BoundsError, match="at least 1"):
            await answers(pair.decode.generate(replace(request(64), tokens=np.array([], np.uint32))))
        await rested(pair)

    run(scenario, make_pair())


def test_room_that_either_side_lacks_is_refused_and_nothing_is_kept() -> None:
    async def scenario(pair: Pair) -> None:
        for node in pair.nodes:
            manager = node.parts.manager
            taken = manager.reserve(PageHashes(), 60, max_hit_pages=0)
            with pytest.raises(CapacityError, match="free"):
                await answers(pair.decode.generate(request(640)))
            manager.end(taken)
            await rested(pair)
        await recovered(pair)

    run(scenario, make_pair(settings=DecodeSettings(prefill_addresses=("p0",), queue_limit=0)))


def test_one_id_at_a_time() -> None:
    async def scenario(pair: Pair) -> None:
        async with aclosing(pair.decode.generate(request(300))) as first:
            await anext(first)
            with pytest.raises(DuplicateRequest):
                await answers(pair.decode.generate(request(300)))
        await answers(pair.decode.generate(request(300)))
        await recovered(pair)

    run(scenario, make_pair())


def test_a_deadline_ends_the_request_and_says_so() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(DeadlineExceeded, match="the request"):
            await answers(pair.decode.generate(request(1000, remaining_s=0.001)))
        manager = pair.decode.parts.manager
        taken = manager.reserve(PageHashes(), 60, max_hit_pages=0)
        with pytest.raises(DeadlineExceeded, match=r"the last stage it reached: decode\.queued") as ended:
            await answers(pair.decode.generate(request(300, seed=1, remaining_s=0.3)))
        assert ended.value.fields["reached"] == "decode.queued"
        manager.end(taken)
        for never in (float("nan"), float("inf")):
            with pytest.raises(BoundsError, match="finite"):
                await answers(pair.decode.generate(request(100, remaining_s=never)))
        await recovered(pair)

    run(scenario, make_pair())


def test_draining_refuses_new_requests_and_waits_for_old_ones() -> None:
    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.engine, "forward")
        running = asyncio.create_task(answers(pair.decode.generate(request(100))))
        await gate.reached()
        drained = asyncio.create_task(pair.decode.drain())
        await until(lambda: pair.decode.source.draining)
        with pytest.raises(Draining):
            await answers(pair.decode.generate(request(100, name="late")))
        assert not drained.done()
        gate.open()
        await running
        await drained
        assert not pair.decode.farewells
        await rested(pair)

    run(scenario, make_pair())


# --- leases, as decode sees them --------------------------------------------------------------------------------------


def test_a_lease_is_renewed_while_an_engine_step_takes_longer_than_it() -> None:
    async def scenario(pair: Pair) -> None:
        renewals: list[LeaseCall] = []
        peer = Meddler(pair, lambda event: [event])

        async def renew(call: LeaseCall) -> float:
            renewals.append(call)
            return await pair.prefill.renew_lease(call)

        peer.renew_lease = renew  # type: ignore[method-assign]
        pair.directory.peers["p0"] = peer
        watch = asyncio.create_task(pair.prefill.watch_leases())
        gate = gated(pair.prefill.parts.engine, "forward", at=2)
        asked = request(300)
        answer = asyncio.create_task(answers(pair.decode.generate(asked)))
        await gate.reached()
        await until(lambda: len(renewals) >= 8)  # a sixth of its life apart: it would have been over by now
        gate.open()
        assert tuple((await answer)[0]) == alone(pair, asked)
        watch.cancel()
        await recovered(pair)

    run(scenario, make_pair(ttl_s=0.6))


class Unwilling(Meddler):
    """Answers renewals with an error, or with a ttl that is none, once it is told to."""

    def __init__(self, pair: Pair, answer: float | Exception) -> None:
        super().__init__(pair, lambda event: [event])
        self._answer = answer
        self.told = asyncio.Event()
        self.renew_lease = self._renew  # type: ignore[method-assign]

    async def _renew(self, call: LeaseCall) -> float:
        await self.told.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (LeaseExpired("over"), LeaseExpired),
        (PeerLost("no answer"), LeaseExpired),
        (float("nan"), ProtocolError),
        (0.0, ProtocolError),
    ],
)
def test_a_lease_that_is_not_renewed_ends_the_request(answer: float | Exception, kind: type[Exception]) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.directory.peers["p0"] = Unwilling(pair, answer)
        gate = gated(pair.prefill.parts.engine, "forward", at=2)
        failing = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await gate.reached()
        peer.told.set()
        # prefill's step holds its pages until it ends; decode's error waits for that, as the stream has one owner
        await until(lambda: any(t.cancelling() for t in asyncio.all_tasks()))
        gate.open()
        with pytest.raises(kind):
            await failing
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair(ttl_s=0.6))


def test_a_node_without_addresses_says_so() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(PeerLost, match="prefill_addresses"):
            await answers(pair.decode.generate(request(100)))
        await answers(pair.decode.generate(request(100, prefill_address="p0")))
        await rested(pair)

    run(scenario, make_pair(settings=DecodeSettings(prefill_allow=("*",))))
