"""Who has to give way, and in which steps a sequence is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from pdkv.errors import ConfigError
from pdkv.ids import PageHashes
from pdkv.node.answer import Answer
from pdkv.node.messages import Sampling, Token
from pdkv.node.preemption import MAX_PREEMPTIONS, Preemption, PreemptPolicy, Runner, spans
from pdkv.node.queue import AdmissionQueue, Ask
from tests.node.toy import Pair, make_pair


@contextmanager
def running(*pages: int) -> Iterator[tuple[Pair, Preemption, list[Runner]]]:
    """Requests that decode, from the oldest to the youngest, with so many pages each."""
    pair = make_pair()
    parts = pair.decode.parts
    preemption = Preemption(parts, AdmissionQueue(parts.manager), PreemptPolicy.RECOMPUTE, 0)
    with ExitStack() as stack:
        runners = []
        for count in pages:
            reservation = parts.manager.reserve(PageHashes(), count, max_hit_pages=0)
            answer = Answer(Token(0, 1, 0.0), 1, Sampling(), pages=reservation.sequence, want_logits=False)
            runner = Runner(cast(Any, None), Ask(PageHashes(), count, 0), reservation, answer, ())
            stack.enter_context(preemption.running(runner))
            runners.append(runner)
        yield pair, preemption, runners
    parts.manager.check()
    assert parts.manager.census()["free"] == parts.manager.census()["total"]
    pair.close()


def asked(runners: list[Runner]) -> list[bool]:
    return [runner.asked for runner in runners]


@pytest.mark.parametrize(
    ("short", "expected"), [(1, [False, False, True]), (4, [False, False, True]), (5, [False, True, True])]
)
def test_the_youngest_give_way_and_no_more_than_it_takes(short: int, expected: list[bool]) -> None:
    with running(4, 4, 4) as (_, preemption, runners):
        assert preemption.make_room(short)
        assert asked(runners) == expected


def test_nobody_gives_way_if_all_together_are_not_enough() -> None:
    with running(4, 4) as (_, preemption, runners):
        assert not preemption.make_room(9)
        assert asked(runners) == [False, False]


def test_who_is_on_the_way_out_counts() -> None:
    with running(4, 4, 4) as (_, preemption, runners):
        assert preemption.make_room(3)
        assert preemption.make_room(4)
        assert asked(runners) == [False, False, True]
        assert preemption.make_room(8)
        assert asked(runners) == [False, True, True]
        assert preemption.make_room(50)  # not enough, but those who were asked still go
        assert asked(runners) == [False, True, True]


def test_who_gave_way_often_enough_stays() -> None:
    with running(4, 4) as (_, preemption, runners):
        runners[1].preempted = MAX_PREEMPTIONS
        assert preemption.make_room(3)
        assert asked(runners) == [True, False]
        assert preemption.make_room(3)
        runners[0].asked, runners[0].preempted = False, MAX_PREEMPTIONS
        assert not preemption.make_room(3)


def test_offload_is_not_for_a_group_of_ranks() -> None:
    async def barrier() -> None: ...

    pair = make_pair()
    parts = replace(pair.decode.parts, barrier=barrier)
    queue = AdmissionQueue(parts.manager)
    with pytest.raises(ConfigError, match="preempt"):
        Preemption(parts, queue, PreemptPolicy.OFFLOAD, 1 << 20)
    Preemption(parts, queue, PreemptPolicy.RECOMPUTE, 1 << 20)
    pair.close()


@pytest.mark.parametrize("starts", [(), (0,), (0, 128, 256), (128, 256)])
@pytest.mark.parametrize("start", [0, 64, 128, 256, 320])
def test_a_sequence_is_computed_again_in_the_shapes_of_the_first_time(start: int, starts: tuple[int, ...]) -> None:
    found = spans(start, 300, 330, starts)
    covered = [position for span in found for position in range(span.start, span.stop)]
    assert covered == list(range(start, 330))
    longest = 128 if len(starts) > 1 else 512
    assert all(span.stop - span.start <= longest for span in found)
    edges = [edge for edge in (*starts, 300) if edge > start]
    assert set(edges) <= {span.stop for span in found}
    assert not [span for span in found if span.start < 300 < span.stop]


def test_nothing_is_computed_again_where_everything_is() -> None:
    assert spans(320, 300, 320, (0, 128)) == []
