"""Who is served when, on a link that is modelled."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.transfer.backends.base import Lane
from pdkv.transfer.orders import Flow
from pdkv.transfer.schedule import AHEAD, COPIED_SHARES, LEAST_BYTES, READS_AT_ONCE, Schedule, Window
from tests.transfer.links import GBIT, PAGE, SETTINGS, Link, Pages, peer, post, took

# --- the link is full, and no more than that is under way -----------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [40_000, PAGE])
@pytest.mark.parametrize("rate", [GBIT, 2 * GBIT, 4 * GBIT, 25 * GBIT])
def test_the_link_is_never_idle_and_little_waits_on_it(rate: float, page_bytes: int) -> None:
    link = Link((rate,))
    long = Pages(peer(page_bytes), int(2 * rate / page_bytes))
    link.add(long)
    link.run(long)
    assert long.ended_s == pytest.approx(long.pages * page_bytes / rate, rel=0.02)
    assert link.most_under_way <= max(1.3 * rate * SETTINGS.under_way_s, READS_AT_ONCE * page_bytes, LEAST_BYTES)


@pytest.mark.parametrize("copied", [True, False])
def test_what_is_copied_while_it_is_posted_runs_beside_no_other_read(copied: bool) -> None:
    schedule, source = Schedule(SETTINGS), peer()
    source.lines[0].lane = Lane("cma", copied=copied)
    schedule.window.arrived(100 * PAGE, schedule.window.mark(0.0), 0.1)
    schedule.add(Pages(source, 1000))
    chosen = schedule.choose()
    assert chosen is not None
    window = schedule.window.bytes
    assert chosen.most_bytes == (COPIED_SHARES * window if copied else window // READS_AT_ONCE)


def test_a_slower_link_has_less_under_way_soon() -> None:
    link = Link((40 * GBIT,))
    first, second = (Pages(peer(40_000), 40_000) for _ in range(2))
    link.add(first)
    link.run(first)
    link.rates = (GBIT,)
    link.add(second)
    for _ in range(3000):
        link.look()
    link.most_under_way = 0
    for _ in range(1000):
        link.look()
    assert link.most_under_way <= max(1.3 * GBIT * SETTINGS.under_way_s, LEAST_BYTES)


def test_the_rate_is_that_of_what_arrived_meanwhile() -> None:
    window = Window(SETTINGS)
    early = window.mark(0.0)
    window.arrived(100 << 20, early, 0.1)
    assert window.bytes == pytest.approx((1000 << 20) * SETTINGS.under_way_s, rel=1e-6)
    late = window.mark(0.1)
    window.arrived(300 << 20, early, 0.4)
    window.arrived(1, late, 0.4)
    assert window.bytes == pytest.approx((1000 << 20) * SETTINGS.under_way_s, rel=1e-3)
    before = window.bytes
    window.arrived(1 << 30, window.mark(0.4), 0.4)
    assert window.bytes == before, "no time passed"


# --- in turn --------------------------------------------------------------------------------------------------------


def test_a_short_request_beside_a_long_one() -> None:
    alone_link = Link((2 * GBIT,))
    alone = Pages(peer(), 4)
    alone_link.add(alone)
    alone_link.run(alone)
    link, source = Link((2 * GBIT,)), peer()
    long = Pages(source, 16_384)
    link.add(long)
    shorts = []
    for number in range(40):
        for _ in range(100 + number):
            link.look()
        short = Pages(source, 4)
        link.add(short)
        link.run(short)
        shorts.append(short)
    assert max(took(*shorts)) <= 2.5 * took(alone)[0]
    assert long.served >= sum(task.served for task in shorts) / AHEAD


@pytest.mark.parametrize("pages", [40, 400])
@pytest.mark.parametrize("sources", [1, 4])
def test_equal_requests_take_equally_long(pages: int, sources: int) -> None:
    """Also when they don't begin together: who is ahead gets no prize for it."""
    link, peers = Link((4 * GBIT,)), [peer() for _ in range(sources)]
    tasks = [Pages(peers[i % sources], pages, Flow(i, pages, 0)) for i in range(4)]
    for task in tasks:
        link.add(task)
        link.look()
    link.run(*tasks)
    assert max(took(*tasks)) <= 1.25 * min(took(*tasks))


def test_turns_are_by_flow_not_by_order() -> None:
    link, source = Link((4 * GBIT,)), peer()
    many = [Pages(source, 50, Flow(1, 1000, 1000 - 50 * i)) for i in range(1, 11)]
    one = Pages(source, 500, Flow(2, 1000, 500))
    link.add(*many, one)
    for _ in range(1000):
        link.look()
    assert one.served == pytest.approx(sum(task.served for task in many), abs=2 * PAGE)


def test_turns_are_by_bytes_also_where_orders_are_small() -> None:
    link, source = Link((4 * GBIT,)), peer(40_000)
    small = [Pages(source, 2, Flow(1, 10_000, 5_000)) for i in range(1000)]
    large = Pages(source, 10_000, Flow(2, 20_000, 10_000))
    link.add(*small, large)
    while small[-1].left:
        link.look()
    assert large.served == pytest.approx(1000 * 80_000, abs=8 << 20)


def test_a_last_chunk_goes_first() -> None:
    """Of 32: the other has 15 to come, so that nobody waits for this one."""
    link, source = Link((4 * GBIT,)), peer()
    other = Pages(source, 512, Flow(1, 16_384, 15 * 512))
    last = Pages(source, 512, Flow(2, 16_384, 0))
    link.add(other, last)
    link.run(last)
    assert other.served <= last.served / AHEAD + 2 * PAGE


def test_a_peer_that_stands_still_has_its_share_and_no_more() -> None:
    link, stopped, source = Link((4 * GBIT,)), peer(), peer()
    hung, going = Pages(stopped, 1000), Pages(source, 400)
    link.add(hung)
    link.look()
    # what runs there never ends
    link.running.clear()
    link.free_at = [0.0]
    link.add(going)
    while not going.over:
        link.look()
        link.running = [read for read in link.running if read[1].task is going]
    assert took(going)[0] == pytest.approx(400 * PAGE / link.rates[0], rel=0.05)
    assert stopped.lines[0].parts <= 4


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(2 * GBIT, 2 * GBIT), (GBIT, 4 * GBIT)])
def test_lines_carry_what_they_can(rates: tuple[float, float]) -> None:
    link = Link(rates)
    long = Pages(peer(lines=2), int(4 * sum(rates) / PAGE))
    link.add(long)
    link.run(long)
    assert long.ended_s == pytest.approx(long.pages * PAGE / sum(rates), rel=0.03)


def test_a_short_request_is_spread_over_all_lines() -> None:
    link = Link((200 * GBIT, 200 * GBIT))
    first, short = Pages(peer(lines=2), 4000), Pages(peer(lines=2), 8)
    link.add(first)
    link.run(first)
    link.served = [0, 0]
    link.add(short)
    link.run(short)
    assert link.served == [4 * PAGE, 4 * PAGE]


def test_no_read_of_pages_goes_to_a_line_that_is_down() -> None:
    link, source = Link((2 * GBIT, 2 * GBIT)), peer(lines=2)
    source.lines[1].down = "unplugged"
    long = Pages(source, 100)
    link.add(long)
    link.run(long)
    assert link.served == [100 * PAGE, 0]
    assert long.ended_s == pytest.approx(100 * PAGE / link.rates[0], rel=0.02)


def test_flows_that_were_given_up_leave_nothing_behind() -> None:
    schedule, source = Schedule(SETTINGS), peer()
    given_up, going = Pages(source, 10, Flow(1, 10, 0)), Pages(source, 10, Flow(2, 10, 0))
    for task in (given_up, going):
        schedule.add(task)
    given_up._left = 0
    chosen = schedule.choose()
    assert chosen is not None
    assert chosen.task is going
    assert list(schedule._flows) == [2]


# --- nobody starves -------------------------------------------------------------------------------------------------


def longest_wait(pages: int, arrivals: list[tuple[int, int]], *, more: int) -> tuple[int, int]:
    """Of a flow of so many pages: bytes that others get between two of its turns; and the most flows at once.

    Others come as (reads posted before, pages); and after each read one of a single page, `more` times.
    """
    schedule, source = Schedule(SETTINGS), peer()
    watched = Pages(source, pages, Flow(0, pages, 0))
    schedule.add(watched)
    coming = [(at, Pages(source, n, Flow(i, n, 0))) for i, (at, n) in enumerate(arrivals, start=1)]
    coming += [(at, Pages(source, 1, Flow(1000 + at, 1, 0))) for at in range(more)]
    passed = longest = number = 0
    alive, most_alive = {id(watched)}, 1
    while watched.left:
        for task in (task for at, task in coming if at == number):
            schedule.add(task)
            alive.add(id(task))
        most_alive = max(most_alive, len(alive))
        chosen = schedule.choose()
        assert chosen is not None
        served, wanted = chosen.task, chosen.task.next(chosen.most_bytes)
        schedule.posted(served, wanted)
        passed = 0 if served is watched else passed + wanted.bytes
        longest = max(longest, passed)
        if not served.left:
            alive.discard(id(served))
            served.over = True
        number += 1
    return longest, most_alive


def bound(flows: int) -> int:
    """Each of its kind may be served what it is behind by, a read, and one more; all of that, so many times by the
    other kind."""
    return (AHEAD + 1) * (flows + 1) * 2 * PAGE


ARRIVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=12)


@given(st.integers(1, 40), ARRIVALS, st.integers(0, 200))
def test_who_waits_is_served_after_a_bounded_number_of_bytes(
    pages: int, arrivals: list[tuple[int, int]], more: int
) -> None:
    """However many come meanwhile."""
    passed, flows = longest_wait(pages, arrivals, more=more)
    assert passed <= bound(flows)


def test_and_would_starve_if_newcomers_went_first() -> None:
    fair, flows = longest_wait(4, [], more=1000)
    assert fair <= bound(flows)
    with patch.object(Schedule, "_last", lambda self, flow, *, ending: 0):
        starved, flows = longest_wait(4, [], more=1000)
    assert starved > bound(flows)


def test_a_flow_near_its_end_waits_for_no_reads_end() -> None:
    """Two reads of a long one run; a short one is posted behind them at once, another long one isn't."""
    schedule, source = Schedule(SETTINGS), peer(40_000)
    schedule.window.arrived(1 << 20, schedule.window.mark(0.0), 0.1)

    long, other, short = Pages(source, 4000), Pages(source, 4000), Pages(source, 4)
    schedule.add(long)
    assert [post(schedule), post(schedule), post(schedule)] == [long, long, None]
    schedule.add(other)
    assert post(schedule) is None
    schedule.add(short)
    assert [post(schedule), post(schedule)] == [short, None]
