"""The prefill node by itself: what it announces, its leases, and what it keeps when a request ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.contract import ContractFacts
from pdkv.errors import (
    BoundsError,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    LeaseExpired,
    LimitReached,
    NeverFits,
    WrongIncarnation,
)
from pdkv.geometry.page_layout import Group
from pdkv.ids import LeaseId, LocalPages, PageHashes
from pdkv.kvcache.page_digest import digest_pages
from pdkv.node.base import NodeParts
from pdkv.node.messages import Accepted, Envelope, GenerateRequest, LeaseCall, PagesSealed, PrefillDone
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.prompt import account_of, plan_prompt
from tests.node.scene import (
    alone,
    gated,
    held,
    prefill_request,
    recovered,
    request,
    rested,
    run,
    said,
    turns,
    until,
)
from tests.node.toy import CHUNK, Pair, make_pair, make_parts


async def met(pair: Pair) -> None:
    await pair.decode.connect("p0")


async def asked_once(
    pair: Pair, asked: GenerateRequest, **more: Any
) -> tuple[Accepted, list[PagesSealed], PrefillDone]:
    """A prefill stream, which must be of the due form."""
    accepted, *sealed, done = await said(pair.prefill.prefill(prefill_request(pair, asked, **more)))
    assert isinstance(accepted, Accepted)
    assert isinstance(done, PrefillDone)
    assert all(isinstance(event, PagesSealed) for event in sealed)
    return accepted, [*filter(None, [accepted.cached]), *sealed], done  # type: ignore[list-item]


def call(pair: Pair, lease_id: LeaseId, **envelope: Any) -> LeaseCall:
    return LeaseCall(replace(pair.decode.parts.envelope(pair.prefill.parts.name), **envelope), lease_id)


async def second_decode(pair: Pair) -> NodeParts:
    """The parts of another decode node, connected."""
    parts = make_parts("d1", ContractFacts(weights_id="toy"), pair.net)
    await pair.prefill.connect(parts.intro())
    return parts


def local(pair: Pair, sealed: PagesSealed) -> LocalPages:
    return LocalPages.checked(sealed.page_ids, pair.prefill.parts.pool.num_pages)


# --- what is announced ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 64, 65, 300])
def test_what_is_announced_is_final_sealed_and_leased(length: int) -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        asked = request(length)
        accepted, sealed, done = await asked_once(pair, asked)
        parts = pair.prefill.parts
        prompt = plan_prompt(asked.tokens, asked.namespace, parts.contract)
        columns = [*sealed, *([done.tail] if done.tail else [])]
        assert [c.first_index for c in columns] == list(np.cumsum([0, *(len(c.hashes) for c in columns)])[:-1])
        assert sum(len(c.hashes) for c in columns) == prompt.pages
        assert b"".join(c.hashes.raw for c in columns) == prompt.hashes.raw + prompt.tail_hash
        for c in columns:
            pages = local(pair, c)
            np.testing.assert_array_equal(c.digests, digest_pages(parts.pool, pages))
            np.testing.assert_array_equal(c.generations, parts.pool.table.generations(pages))
            assert parts.manager.hashes(pages) == c.hashes
        if done.tail and length % 64:
            rows = parts.pool.main_view(0)[int(done.tail.page_ids[0])]
            assert rows[: length % 64].any(dim=1).all()
            assert not rows[length % 64 :].any(), "what another request left there leaves the node"
        assert done.account == account_of(prompt, parts.contract)
        assert done.first_token == alone(pair, asked)[0]
        assert len(pair.prefill.source.leases) == 1
        await pair.prefill.release_lease(call(pair, accepted.lease_id))
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("wanted", [0, 1, 3, 4])
def test_pages_found_in_the_tree_are_announced_at_once_from_the_first_wanted_on(wanted: int) -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        first, second = request(300), request(300, name="r1")
        _, sealed, _ = await asked_once(pair, first)
        steps = len(pair.prefill.parts.engine.steps)  # type: ignore[attr-defined]
        _, again, done = await asked_once(pair, second, first_page_wanted=wanted)
        assert pair.prefill.parts.engine.steps[steps:] == [(256, 300)]  # type: ignore[attr-defined]
        assert done.chunk_starts == (256,)
        before = np.concatenate([c.page_ids for c in sealed])
        assert [c.first_index for c in again] == ([wanted] if wanted < 4 else [])
        if again:
            assert again[0].page_ids.tolist() == before[wanted:].tolist()
        for lease_id in list(pair.prefill.parts.manager.leased):
            await pair.prefill.release_lease(call(pair, lease_id))
        await rested(pair)

    run(scenario, make_pair())


def test_a_longer_prompt_of_a_caller_that_has_more_than_this_node() -> None:
    """Pages that the caller has and this node lacks are computed, but not announced."""

    async def scenario(pair: Pair) -> None:
        await met(pair)
        _, sealed, done = await asked_once(pair, request(300), first_page_wanted=3)
        assert [(c.first_index, len(c.hashes)) for c in sealed] == [(3, 1)]
        assert done.chunk_starts == (0, 128, 256)

    run(scenario, make_pair())


def test_the_second_cache_is_announced_with_the_first() -> None:
    """Each announced page has a digest of both caches, and none of them is empty."""

    async def scenario(pair: Pair) -> None:
        await met(pair)
        _, sealed, _ = await asked_once(pair, request(CHUNK))
        for page in local(pair, sealed[0]):
            for group in Group:
                assert all(part.any() for part in pair.prefill.parts.pool.group_bytes(page, group))

    run(scenario, make_pair())


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_its_owners_alone() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        other = await second_decode(pair)
        accepted, _, _ = await asked_once(pair, request(300))
        mine, theirs = call(pair, accepted.lease_id), call(pair, accepted.lease_id, sender=other.name)
        with pytest.raises(LeaseExpired):
            await pair.prefill.renew_lease(theirs)
        await pair.prefill.release_lease(theirs)
        assert held(pair.prefill) == len(pair.prefill.source.leases) == 1
        ((lease_id, told),) = pair.prefill.status().held_leases.items()
        assert (lease_id, told.peer, told.computing) == (accepted.lease_id, str(pair.decode.parts.name), False)
        assert 0 < told.left_s <= 30
        assert await pair.prefill.renew_lease(mine) == accepted.ttl_s == 30.0
        for _ in range(2):
            await pair.prefill.release_lease(mine)
        await rested(pair)
        with pytest.raises(LeaseExpired):
            await pair.prefill.renew_lease(mine)
        other.close()
        await recovered(pair)

    run(scenario, make_pair())


def test_a_lease_that_runs_out_after_prefill_leaves_ordinary_cache() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        accepted, _, _ = await asked_once(pair, request(300))
        watch = asyncio.create_task(pair.prefill.watch_leases())  # only now: a slow machine takes longer than a lease
        await until(lambda: not pair.prefill.source.leases)
        assert pair.prefill.parts.manager.census()["cached"] == 4
        with pytest.raises(LeaseExpired):
            await pair.prefill.renew_lease(call(pair, accepted.lease_id))
        watch.cancel()
        await recovered(pair)

    run(scenario, make_pair(ttl_s=0.05))


def test_a_lease_that_runs_out_under_its_request_ends_it_by_name_after_the_step() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        gate = gated(pair.prefill.parts.engine, "forward", at=2)
        asking = asyncio.create_task(asked_once(pair, request(300)))
        await gate.reached()
        watch = asyncio.create_task(pair.prefill.watch_leases())
        await until(lambda: not pair.prefill.source.leases)
        await turns()
        assert held(pair.prefill) > 0
        assert not asking.done()
        gate.open()
        with pytest.raises(LeaseExpired, match="while prefill ran"):
            await asking
        watch.cancel()
        await recovered(pair)

    run(scenario, make_pair(ttl_s=0.05))


def test_many_leases_end_each_at_its_own_time() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        watch = asyncio.create_task(pair.prefill.watch_leases())
        first, _, _ = await asked_once(pair, request(100))
        for i in range(3):
            await asked_once(pair, request(100, seed=i, name=f"r{i + 1}"))
        while len(pair.prefill.source.leases) > 1:
            await pair.prefill.renew_lease(call(pair, first.lease_id))
            await asyncio.sleep(0)
        await until(lambda: not pair.prefill.source.leases)
        watch.cancel()
        await recovered(pair)

    run(scenario, make_pair(ttl_s=1.0))


@pytest.mark.parametrize("taken", range(6))
def test_a_lease_ends_with_a_stream_that_is_not_taken_to_its_end(taken: int) -> None:
    """Also when prefill has long ended and only waits to be heard: Accepted, two announcements, done, the end."""

    async def scenario(pair: Pair) -> None:
        await met(pair)
        stream = pair.prefill.prefill(prefill_request(pair, request(256)))
        events = [await anext(stream) for _ in range(min(taken, 4))]
        if taken == 5:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif events:
            await until(lambda: pair.prefill.status().requests == 0)
        await stream.aclose()
        assert len(pair.prefill.source.leases) == (taken == 5)
        if taken == 5:
            await pair.prefill.release_lease(call(pair, events[0].lease_id))  # type: ignore[union-attr]
        await recovered(pair)

    run(scenario, make_pair())


# --- who may ask for what ---------------------------------------------------------------------------------------------

STRANGERS: dict[str, tuple[Callable[[Envelope], Envelope], type[Exception]]] = {
    "another life of this node": (
        lambda e: replace(e, receiver=replace(e.receiver, incarnation="0" * 32)),  # type: ignore[arg-type]
        WrongIncarnation,
    ),
    "another life of the caller": (
        lambda e: replace(e, sender=replace(e.sender, incarnation="0" * 32)),  # type: ignore[arg-type]
        WrongIncarnation,
    ),
    "another content": (lambda e: replace(e, content_fingerprint=bytes(32)), ContractMismatch),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_every_message_is_checked_for_who_and_what_it_is_about(who: str) -> None:
    change, kind = STRANGERS[who]

    async def scenario(pair: Pair) -> None:
        await met(pair)
        accepted, _, _ = await asked_once(pair, request(100))
        right = pair.decode.parts.envelope(pair.prefill.parts.name)
        wrong = change(right)
        with pytest.raises(kind):
            await pair.prefill.renew_lease(LeaseCall(wrong, accepted.lease_id))
        with pytest.raises(kind):
            await pair.prefill.release_lease(LeaseCall(wrong, accepted.lease_id))
        with pytest.raises(kind):
            await said(pair.prefill.prefill(replace(prefill_request(pair, request(100)), envelope=wrong)))
        assert len(pair.prefill.source.leases) == 1
        await pair.prefill.release_lease(LeaseCall(right, accepted.lease_id))
        await recovered(pair)

    run(scenario, make_pair())


def test_a_request_id_runs_once_for_each_caller() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        other = await second_decode(pair)
        gate = gated(pair.prefill.parts.engine, "forward")
        first = asyncio.create_task(asked_once(pair, request(100)))
        await gate.reached()
        with pytest.raises(DuplicateRequest):
            await asked_once(pair, request(100))
        assert len(pair.prefill.source.leases) == 1
        theirs = asyncio.create_task(asked_once(pair, request(100), envelope=other.envelope(pair.prefill.parts.name)))
        gate.open()
        got = [await first, await theirs, await asked_once(pair, request(100))]
        assert len({accepted.lease_id for accepted, _, _ in got}) == 3
        other.close()

    run(scenario, make_pair())


BAD: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "page before the first": ({"first_page_wanted": -1}, BoundsError),
    "page past the last": ({"first_page_wanted": 5}, BoundsError),
    "no tokens": ({"tokens": np.empty(0, np.uint32)}, BoundsError),
    "no such token": ({"tokens": np.array([257], np.uint32)}, BoundsError),
    "no deadline": ({"remaining_s": float("inf")}, BoundsError),
    "no number": ({"remaining_s": float("nan")}, BoundsError),
    "no time": ({"remaining_s": 0.0}, DeadlineExceeded),
    "past": ({"remaining_s": -5.0}, DeadlineExceeded),
    "more than the pool": ({"tokens": np.zeros(64 * 64, np.uint32)}, NeverFits),
}


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_makes_no_sense_leaves_nothing(what: str) -> None:
    fields, kind = BAD[what]

    async def scenario(pair: Pair) -> None:
        await met(pair)
        with pytest.raises(kind):
            await said(pair.prefill.prefill(replace(prefill_request(pair, request(300)), **fields)))
        await recovered(pair)

    run(scenario, make_pair())


def test_no_room_now_is_said_and_leaves_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        manager = pair.prefill.parts.manager
        taken = manager.reserve(PageHashes(), 60, max_hit_pages=0)
        with pytest.raises(CapacityError):
            await asked_once(pair, request(300))
        assert len(pair.prefill.source.leases) == 0
        manager.end(taken)
        await recovered(pair)

    run(scenario, make_pair())


def test_a_node_that_holds_all_the_leases_that_it_may_is_told_so_and_gets_on_after_a_release() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        accepted, _, _ = await asked_once(pair, request(70, name="first"))
        with pytest.raises(LimitReached, match="d0 holds 1 leases; one node may hold 1"):
            await said(pair.prefill.prefill(prefill_request(pair, request(70, seed=1, name="second"))))
        await pair.prefill.release_lease(
            LeaseCall(pair.decode.parts.envelope(pair.prefill.parts.name), accepted.lease_id)
        )
        await recovered(pair)

    pair = make_pair()
    pair.prefill = pair.directory.peers["p0"] = PrefillNode(
        pair.prefill.parts, PrefillSettings(CHUNK, leases_per_peer=1)
    )
    run(scenario, pair)


def test_a_chunk_is_whole_pages() -> None:
    pair = make_pair()
    for chunk in (0, -64, 63, 100):
        with pytest.raises(BoundsError, match="chunk_tokens"):
            PrefillNode(pair.prefill.parts, PrefillSettings(chunk_tokens=chunk))
    pair.close()


def test_draining_refuses_what_is_new_and_waits_for_the_last_lease() -> None:
    async def scenario(pair: Pair) -> None:
        await met(pair)
        accepted, _, _ = await asked_once(pair, request(100))
        drained = asyncio.create_task(pair.prefill.drain())
        await turns()
        with pytest.raises(Draining):
            await asked_once(pair, request(100))
        assert not drained.done()
        await pair.prefill.renew_lease(call(pair, accepted.lease_id))
        await pair.prefill.release_lease(call(pair, accepted.lease_id))
        await drained
        await rested(pair)

    run(scenario, make_pair())
