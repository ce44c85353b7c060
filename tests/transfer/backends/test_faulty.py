"""Each fault does what its name says, to the read that it was meant for and to no other."""

import logging
import time
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import ConfigError, PdkvError, ProtocolError
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.faulty import FaultPlan, FaultRule, FaultyFactory, Trouble, faulty
from pdkv.transfer.orders import ReadOutcome, ReadStatus, TransferSettings
from pdkv.transfer.tasks import Ticket
from tests.transfer.pairs import FAR_S, CorePair
from tests.transfer.pools import TestPool, offer_of

PAGE = TestPool(num_pages=2, fill=False).fmt.page_bytes


def pair_with(text: str, *, connect: bool = True) -> CorePair:
    """Every page is a read of its own."""
    return CorePair(settings=TransferSettings(read_max_bytes=PAGE), plan=FaultPlan.parse(text), connect=connect)


def read(pair: CorePair, *pages: int) -> ReadOutcome:
    return pair.done(pair.read(list(pages), list(pages)))


def injected(pair: CorePair) -> dict[Trouble, int]:
    factory = pair.rails["0"]
    assert isinstance(factory, FaultyFactory)
    return dict(factory.injected)


def wrong_bits(pair: CorePair, page: int) -> int:
    mine, theirs = (np.frombuffer(p.page(page), np.uint8) for p in (pair.sink_pool, pair.source_pool))
    return int(np.unpackbits(mine ^ theirs).sum())


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "corrupt:p=0.01,lose:nth=3,delay:p=0.1:s=0.05;seed=7",
        "fail:nth=2:of=rows,hang:p=1:of=probes,stale:nth=1,garble:p=0.5;seed=0",
        "down:nth=4:s=2;seed=3",
        ";seed=3",
    ],
)
def test_a_plan_reads_as_it_is_written(text: str) -> None:
    assert str(FaultPlan.parse(text)) == text


def test_spaces_and_an_absent_seed_are_no_matter() -> None:
    assert FaultPlan.parse(" fail:nth=1 , stale:p=1 ") == FaultPlan(
        (FaultRule(Trouble.FAIL, nth=1), FaultRule(Trouble.STALE, p=1.0, of="rows")), seed=0
    )
    assert FaultPlan.parse("") == FaultPlan()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("explode:p=1", "kind in 'explode:p=1': 'explode'"),
        ("fail", "settings in 'fail'.*p or nth"),
        ("fail:p=0.1:nth=2", "p or nth"),
        ("fail:p=0.1:p=0.2", "each once"),
        ("fail:q=1", "p, nth, of; each once"),
        ("fail:p=0.1:s=1", "p, nth, of; each once"),
        ("stale:nth=1:of=pages", "p, nth; each once"),
        ("delay:p=0.1", "p or nth, and s"),
        ("fail:p=1.5", "p in 'fail:p=1.5': '1.5'.*at most 1"),
        ("fail:p=nan", "p in 'fail:p=nan'"),
        ("fail:nth=0", "nth in 'fail:nth=0': '0'.*above 0"),
        ("fail:nth=x", "nth in 'fail:nth=x': 'x'"),
        ("fail:nth=1:of=peers", "of in .*pages, rows, probes"),
        ("fail:nth=1;speed=7", "after the ;.*seed=NUMBER"),
        ("fail:nth=1;seed=x", "seed: 'x'"),
    ],
)
def test_a_plan_that_cant_be_used_says_which_part(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        FaultPlan.parse(text)


def test_without_rules_there_is_nothing_in_between() -> None:
    factory = backend_factory("loopback")
    assert faulty(factory, FaultPlan.parse(";seed=9")) is factory


# --- each kind ------------------------------------------------------------------------------------------------------


def test_fail() -> None:
    pair = pair_with("fail:nth=2")
    assert [read(pair, p).status for p in (1, 2, 3)] == [ReadStatus.DONE, ReadStatus.FAILED, ReadStatus.DONE]
    assert injected(pair) == {Trouble.FAIL: 1}


def test_lose_settles_with_the_agent() -> None:
    pair = pair_with("lose:nth=1")
    outcome = read(pair, 1)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    pair.step(20)
    assert not outcome.settled.done()
    pair.sink.close("closed")
    assert outcome.settled.done()


def test_hang_has_no_end_and_can_be_fenced_off() -> None:
    pair = pair_with("hang:nth=1")
    hanging = pair.read([1], [1])
    pair.step(20)
    assert not hanging.done()
    outcome = pair.done(hanging, later_s=FAR_S)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    pair.step(later_s=FAR_S)
    pair.done(outcome.settled, later_s=FAR_S + 100.0)
    assert injected(pair) == {Trouble.HANG: 1}, "the next agent counts on"


def test_disconnect_lasts_until_the_peer_is_added_again() -> None:
    pair = pair_with("disconnect:nth=2")
    assert read(pair, 1).status is ReadStatus.DONE
    assert [read(pair, p).status for p in (2, 3)] == [ReadStatus.FAILED] * 2
    assert injected(pair) == {Trouble.DISCONNECT: 1}
    pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)))
    assert read(pair, 4).status is ReadStatus.DONE


def test_disconnect_ends_the_reads_that_run() -> None:
    pair = pair_with("disconnect:nth=1")
    futures = [pair.read([p], [p]) for p in (1, 2)]
    assert [pair.done(f).status for f in futures] == [ReadStatus.FAILED] * 2


def test_delay() -> None:
    pair = pair_with("delay:nth=1:s=0.05")
    began = time.monotonic()
    late = pair.read([1], [1])
    while not late.done():
        pair.step()
    assert time.monotonic() - began >= 0.05
    assert late.result().status is ReadStatus.DONE
    assert wrong_bits(pair, 1) == 0


def test_down_is_all_of_one_rail_and_nothing_of_the_other() -> None:
    """The reads of both are counted together: the second one goes to the other rail than the first."""
    settings = TransferSettings(read_max_bytes=PAGE, line_stall_s=0.05)
    pair = CorePair(settings=settings, rails=2, plan=FaultPlan.parse("down:nth=2:s=1000"))
    future = pair.read(list(range(1, 13)), list(range(1, 13)))
    until = time.monotonic() + 20.0
    while not future.done() and time.monotonic() < until:
        pair.step()
    assert future.result(0.0).status is ReadStatus.DONE
    assert all(wrong_bits(pair, page) == 0 for page in range(1, 13))
    status = pair.sink.status(0.0)
    assert [bool(rail.down) for rail in status.rails] == [False, True]
    assert status.rotations == 1
    assert injected(pair) == {Trouble.DOWN: 1}


@pytest.mark.parametrize("seed", range(5))
def test_corrupt_flips_one_bit_of_what_landed(seed: int) -> None:
    pair = pair_with(f"corrupt:nth=2;seed={seed}")
    outcome = read(pair, 1, 2, 3)
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert sorted(wrong_bits(pair, p) for p in (1, 2, 3)) == [0, 0, 1]
    assert not any(any(pair.sink_pool.page(p)) for p in (4, 5, 15)), "and nothing else"


def test_stale_changes_the_generation_of_one_row() -> None:
    pair = pair_with("stale:nth=2")
    assert not read(pair, 1, 2, 3).stale.any()
    assert sorted(read(pair, 1, 2, 3).stale.tolist()) == [False, False, True]
    assert not read(pair, 1, 2, 3).stale.any()


def test_garbled_metadata_is_refused_and_the_peer_can_come_again() -> None:
    pair = pair_with("garble:nth=1", connect=False)
    offer = offer_of(pair.source.metadata, pair.source_pool)
    with pytest.raises(ProtocolError):
        pair.add(pair.source_name, offer)
    pair.done(pair.add(pair.source_name, offer))
    assert read(pair, 1).status is ReadStatus.DONE


def test_probes_count_apart() -> None:
    pair = pair_with("fail:nth=2:of=probes")
    assert read(pair, 1, 2).status is ReadStatus.DONE
    ticket: Ticket = Ticket()
    pair.sink.probe(pair.source_name, ticket)
    with pytest.raises(PdkvError, match="on purpose"):
        pair.done(ticket.future)


def test_of_two_ends_the_first_is_told() -> None:
    pair = pair_with("fail:nth=1,lose:nth=1,corrupt:nth=1")
    assert read(pair, 1).status is ReadStatus.FAILED
    assert injected(pair) == {Trouble.FAIL: 1, Trouble.CORRUPT: 1}


def test_it_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    pair = pair_with("fail:nth=2")
    with caplog.at_level(logging.WARNING):
        for page in (1, 2, 3):
            read(pair, page)
    assert [r.getMessage() for r in caplog.records] == [
        f"fault on purpose: fail, pages read 2, from {pair.source_name}"
    ]
    assert pair.sink.backend_name == "faulty loopback"


# --- the seed -------------------------------------------------------------------------------------------------------


def hits(text: str) -> list[tuple[int, ...]]:
    factory = faulty(backend_factory("loopback"), FaultPlan.parse(text))
    assert isinstance(factory, FaultyFactory)
    found = []
    for number in range(200):
        kinds = [rule.kind for rule, _ in factory.draw("pages", AgentName("x"))]
        found += [(number, list(Trouble).index(kind)) for kind in kinds]
    return found


def test_the_seed_decides() -> None:
    plan = "corrupt:p=0.1,delay:p=0.3:s=0.01"
    assert hits(f"{plan};seed=7") == hits(f"{plan};seed=7")
    assert hits(f"{plan};seed=7") != hits(f"{plan};seed=8")
    delays = sum(kind == list(Trouble).index(Trouble.DELAY) for _, kind in hits(f"{plan};seed=7"))
    assert 40 <= delays <= 80


def test_a_rule_draws_whether_or_not_others_hit() -> None:
    corrupt = list(Trouble).index(Trouble.CORRUPT)
    alone = hits("corrupt:p=0.1;seed=7")
    assert [h for h in hits("corrupt:p=0.1,delay:p=0.3:s=0.01;seed=7") if h[1] == corrupt] == alone


def test_bytes_of_a_gpu_cant_be_changed_from_here() -> None:
    pool = TestPool(fill=False)
    device = replace(pool.map(), memory="VRAM")
    for text, error in (("corrupt:p=1", ConfigError), ("fail:p=1", PdkvError)):
        backend = faulty(CorePair(connect=False).net.backend, FaultPlan.parse(text))(AgentName(text))
        with pytest.raises(error, match="corrupt or stale" if error is ConfigError else "loopback memory"):
            backend.register(device.regions[0].address, 64, "VRAM", 0)
