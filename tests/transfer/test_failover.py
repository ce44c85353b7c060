"""Lines that go down under reads: what moves to others, when, and that nothing lands late."""

from itertools import pairwise

import pytest

from pdkv.transfer.agents import Run
from pdkv.transfer.backends.loopback import Fault, FaultKind
from pdkv.transfer.core import TransferCore
from pdkv.transfer.lines import serving_agent
from pdkv.transfer.orders import Probe, ReadOutcome, ReadStatus
from pdkv.transfer.rotation import Rotation
from pdkv.transfer.tasks import Ticket
from tests.transfer.pools import Announced, TestPool, offer_of, peer_name
from tests.transfer.town import AT_ONCE_S, PAGE, PAGES, SETTINGS, TICK_S, Town, down, some_done

# --- both are up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), [(1, 1), (2, 2), (1, 2), (2, 1), (3, 2)])
def test_an_order_is_striped_over_all_lines(here: int, there: int) -> None:
    town = Town(here, there)
    for i in range(there):
        town.net.script(town.agent(i), *[Fault(FaultKind.LATE, polls=2)] * 20)
    future = town.read()
    carried = set()
    while not future.done():
        carried |= {line.rail for line in town.sink.peers[town.source_name].lines if line.parts}
        town.sink.step(town.now)
    outcome = future.result()
    assert outcome.status is ReadStatus.DONE
    assert outcome.backend_bytes == len(PAGES) * PAGE
    assert town.right()
    assert carried == set(range(here))


# --- one goes down --------------------------------------------------------------------------------------------------


def test_what_ran_on_a_rail_that_is_down_comes_over_the_other_and_nothing_lands_late() -> None:
    town = Town()
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    assert town.line(1).parts
    outcome = town.done(future, 2.0)
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert town.right()
    status = town.sink.status(town.now)
    assert status.rotations == 1
    assert [(rail.device, bool(rail.down)) for rail in status.rails] == [("here0", False), ("here1", True)]
    assert status.rails[1].down == (f"{town.source_name}: nothing came on it for 1 s",)
    assert not town.late_writes(1)


def test_without_the_fence_the_old_rail_writes_into_pages_that_were_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one above: parts that go on before the agent of the rail is destroyed."""

    def finish(rotation: Rotation) -> list[Run]:
        old, rotation._retired = rotation._retired, None
        for run in old.running if old is not None else ():
            run.task.outstanding -= 1
            run.line.finished(run.wanted.bytes)
        return [] if old is None else old.running

    monkeypatch.setattr(Rotation, "finish", finish)
    town = Town()
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    assert town.done(future, 2.0).status is ReadStatus.DONE
    assert town.right()
    assert town.late_writes(1)


def test_a_part_is_posted_anew_only_when_the_agent_of_its_rail_is_gone() -> None:
    town = Town()
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    (old,) = (agent for agent in town.sink.status(0.0).agents if agent.startswith("read1-1."))
    while town.net.alive(old):
        assert not future.done()
        town.sink.step(town.now)
        town.now += TICK_S / 4
    assert town.done(future).status is ReadStatus.DONE


def test_a_rail_whose_connection_ends_is_left_at_once() -> None:
    """Its reads have proven ends, so nothing is fenced."""
    town = Town()
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    town.net.kill(town.agent(1))
    assert town.done(future, AT_ONCE_S).status is ReadStatus.DONE
    assert town.right()
    assert town.sink.status(0.0).rotations == 0
    assert "is gone" in town.line(1).down


def test_a_read_that_was_lost_on_a_rail_is_fenced_before_it_comes_again() -> None:
    town = Town()
    town.net.script(town.agent(1), Fault(FaultKind.LOSE))
    assert town.done(town.read(), AT_ONCE_S).status is ReadStatus.DONE
    assert town.right()
    assert town.sink.status(0.0).rotations == 1
    assert town.line(1).down == "scripted loss"


def test_rows_come_over_the_other_rail_too() -> None:
    town = Town()
    future = town.read([1])
    while not any(town.sink_pool.page(1)):
        town.sink.step(town.now)
    for _ in range(10):
        if town.line(1).running or town.line(0).running:
            break
        town.sink.step(town.now)
    row_line = 1 if town.line(1).running else 0
    town.net.cut(town.agent(row_line))
    outcome = town.done(future, 3.0)
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()


def test_others_reads_on_the_rail_end_well() -> None:
    """The other peer's line on the same rail here is up: its read runs to its end on the agent that goes then."""
    town = Town()
    other_name, other_pool = peer_name("other"), TestPool(seed=2)
    other = TransferCore({"a": town.net.backend, "b": town.net.backend}, other_name, other_pool.map(), SETTINGS)
    ticket: Ticket[None] = Ticket(drawn=town.now)
    town.sink.add_peer(other_name, offer_of(other.metadata, other_pool), ticket)
    town.done(ticket.future)
    town.net.script(serving_agent(other_name, 1), Fault(FaultKind.LATE, polls=100))
    order = Announced.of(other_name, other_pool).order([13, 14], [1, 2], town.sink_pool.num_pages, 100.0)
    theirs: Ticket[ReadOutcome] = Ticket(drawn=town.now)
    town.sink.read(order, theirs)
    town.net.cut(town.agent(1))
    mine = town.read()
    assert town.done(mine).status is ReadStatus.DONE
    assert town.done(theirs.future).status is ReadStatus.DONE
    assert town.sink_pool.page(13) == other_pool.page(1)
    assert not town.late_writes(1)


# --- not the rail, but the peer --------------------------------------------------------------------------------------


def test_a_peer_that_stands_still_has_no_line_down() -> None:
    town = Town()
    future = town.read(deadline_s=5.0)
    for rail in range(2):
        town.net.cut(town.agent(rail))
    town.step(4.0)
    assert not any(line.down for line in town.sink.peers[town.source_name].lines)
    outcome = town.done(future)
    assert outcome.status is ReadStatus.UNSETTLED, "as with one rail"
    assert outcome.settled is not None
    for rail in range(2):
        town.net.join(town.agent(rail))
    town.done(outcome.settled)
    assert town.done(town.read()).status is ReadStatus.DONE


def test_a_peer_with_no_rail_left_is_lost() -> None:
    town = Town()
    future = town.read()
    for rail in range(2):
        town.net.kill(town.agent(rail))
    assert town.done(future, AT_ONCE_S).status is ReadStatus.FAILED
    assert "is gone" in town.sink.peers[town.source_name].lost


def test_the_second_rail_that_goes_down_too_leaves_the_order_to_its_deadline() -> None:
    town = Town()
    future = town.read(deadline_s=10.0)
    town.net.cut(town.agent(1))
    some_done(town)
    town.step(0.6)
    town.net.cut(town.agent(0))
    town.step(5.0)
    assert not future.done()
    assert len(town.sink.peers[town.source_name].up) >= 1
    outcome = town.done(future)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    town.done(outcome.settled, 60.0)
    assert not any(town.late_writes(rail) for rail in range(2)), "both agents are gone"


def test_an_order_that_is_given_up_on_a_rail_that_is_down_settles_with_its_agent() -> None:
    town = Town()
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    town.sink.cancel(future)
    outcome = future.result()
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    probes: Ticket[Probe] = Ticket(drawn=town.now)
    town.sink.probe(town.source_name, probes)
    town.done(outcome.settled, 3.0)
    assert not town.late_writes(1)


# --- it comes back ---------------------------------------------------------------------------------------------------


def test_a_rail_that_comes_back_is_used_again() -> None:
    town = Town()
    down(town)
    town.net.join(town.agent(1))
    town.step(SETTINGS.line_retry_s + 0.5)
    assert not town.line(1).down
    town.net.script(town.agent(1), *[Fault(FaultKind.LATE, polls=2)] * 9)
    future = town.read()
    town.sink.step(town.now)
    town.sink.step(town.now)
    assert town.line(1).parts
    assert town.done(future).status is ReadStatus.DONE


def test_one_that_stays_down_is_tried_less_and_less_often() -> None:
    town = Town()
    down(town)
    # what the probe posts has an end, or it would be waited for
    town.net.script(town.agent(1), *[Fault(FaultKind.FAIL)] * 99)
    town.net.join(town.agent(1))
    tried = []
    for _ in range(int(200 / TICK_S)):
        before = len(town.net._scripts[town.agent(1)])
        town.step()
        if len(town.net._scripts[town.agent(1)]) < before:
            tried.append(town.now)
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert len(tried) >= 4
    assert waits == sorted(waits)
    assert waits[-1] <= 60.0 + 1.0
    assert town.done(town.read()).status is ReadStatus.DONE
