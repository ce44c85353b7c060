"""What a task says at its end follows from the ends of its reads alone, in whatever order they come."""

from collections import deque
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdkv.transfer.backends.base import End, EndState
from pdkv.transfer.descriptors import plan
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Peer
from pdkv.transfer.orders import ReadOutcome, ReadStatus
from pdkv.transfer.tasks import OrderTask, Table, Ticket, Wanted
from tests.transfer.pools import Announced, TestPool, offer_of, peer_name

POOL = TestPool(seed=1)
NAME = peer_name("prefill")
PAGES = [1, 2, 3, 4, 5]
PAGE = POOL.fmt.page_bytes
LIMIT = 2
"""Reads at once."""


def order_task(rows: int = 8) -> tuple[OrderTask, LandingRows]:
    peer = Peer(NAME, offer_of(b"", POOL), plan(POOL.map(), POOL.map()), ())
    landing = LandingRows(rows)
    order = Announced.of(NAME, POOL).order(PAGES, PAGES, POOL.num_pages)
    ticket: Ticket[ReadOutcome] = Ticket()
    return OrderTask(order, peer, ticket, landing), landing


def post(task: OrderTask) -> Wanted | None:
    if not task.due:
        return None
    task.outstanding += 1
    return task.next(PAGE)


def end(task: OrderTask, wanted: Wanted, state: EndState) -> None:
    done = state is EndState.DONE
    how = End(state, "" if done else state.value, bytes=PAGE * done, descriptors=int(done))
    if state is EndState.LOST:
        task.lost(how)
        return
    task.outstanding -= 1
    task.ended(wanted, how, 0.5)


ENDS = st.lists(st.sampled_from([*EndState, EndState.DONE, EndState.DONE]), min_size=6, max_size=6)
MOVES = st.lists(st.sampled_from(["post", "first", "last", "give up", "stop"]), max_size=30)


@given(ENDS, MOVES)
def test_the_outcome_is_what_was_proven(ends: list[EndState], moves: list[str]) -> None:
    task, landing = order_task()
    running: list[Wanted] = []
    lost: list[Wanted] = []
    seen: list[EndState] = []
    left = deque(ends)
    posted_rows_early = False

    def conclude(which: int) -> None:
        wanted = running.pop(which)
        seen.append(left.popleft())
        if seen[-1] is EndState.LOST:
            lost.append(wanted)
        end(task, wanted, seen[-1])

    def check() -> None:
        if not task.future.done():
            assert not task.over
            return
        outcome = task.future.result()
        if outcome.status is ReadStatus.DONE:
            assert seen == [EndState.DONE] * 6
        if outcome.status is ReadStatus.FAILED:
            assert not running
            assert not lost
        assert (outcome.settled is None) == (outcome.status is not ReadStatus.UNSETTLED)
        if outcome.settled is not None:
            assert outcome.settled.done() == (not running and not lost)
        assert task.over == (not running and not lost)
        if task.over:
            assert landing.free == 8

    for move in moves:
        if move == "post" and len(running) < LIMIT:
            wanted = post(task)
            if wanted is not None:
                posted_rows_early |= wanted.table is Table.ROWS and bool(running)
                running.append(wanted)
        elif move in ("first", "last") and running:
            conclude(0 if move == "first" else -1)
        elif move == "give up":
            task.give_up("deadline")
            assert task.future.done()
        elif move == "stop":
            task.stop("peer is gone")
        check()
    assert not posted_rows_early
    while running:
        conclude(0)
        check()
    if not task.over and not lost:
        task.stop("closed")
    while lost:
        assert task.future.result().status is ReadStatus.UNSETTLED
        end(task, lost.pop(), EndState.FAILED)
    assert task.over
    settled = task.future.result().settled
    assert settled is None or settled.done()
    assert landing.free == 8


def test_an_order_of_five_parts_is_accounted_for_without_its_rows() -> None:
    task, _ = order_task()
    for _ in PAGES:
        wanted = post(task)
        assert wanted is not None
        assert wanted.table is Table.PAGES
        end(task, wanted, EndState.DONE)
    rows = post(task)
    assert rows is not None
    assert rows.table is Table.ROWS
    assert rows.remote.tolist() == PAGES
    end(task, rows, EndState.DONE)
    outcome = task.future.result()
    assert outcome.status is ReadStatus.DONE
    assert (outcome.bytes, outcome.backend_bytes, outcome.descriptors) == (5 * PAGE, 5 * PAGE, 5)
    assert outcome.post_s == 2.5
    # nothing landed in this test: every row differs from what was announced
    assert outcome.stale.all()


def test_rows_wait_for_room_to_land() -> None:
    task, landing = order_task(rows=5)
    taken = landing.take(1)
    parts: list[Any] = [post(task) for _ in PAGES]
    for part in parts:
        end(task, part, EndState.DONE)
    assert post(task) is None
    landing.give_back(taken)
    rows = post(task)
    assert rows is not None
    assert np.array_equal(np.sort(rows.local), np.arange(5))
