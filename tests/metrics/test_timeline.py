"""Parts of the time to a first token."""

from __future__ import annotations

import pytest

from pdkv.ids import RequestId
from pdkv.metrics.names import TTFT_STAGES
from pdkv.metrics.timeline import Timeline
from pdkv.node.stages import Stage

R = RequestId("r")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told(*reached: tuple[float, Stage]) -> dict[str, float]:
    """Parts of a request that began at 0 s and was at those stages then."""
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin(R)
    for at_s, stage in reached:
        clock.now_s = 100.0 + at_s
        timeline.hook(stage, R)
    return timeline.end(R)


WHOLE = (
    (1.0, Stage.RESERVED),
    (1.1, Stage.ASKED),
    (2.0, Stage.ARRIVED),
    (4.0, Stage.PREFILLED),
    (4.5, Stage.ARRIVED),
    (4.75, Stage.COMMITTED),
    (5.0, Stage.ADMITTED),
    (9.0, Stage.DECODING),
)


def test_parts_add_up_to_the_admission() -> None:
    parts = told(*WHOLE)
    assert tuple(parts) == TTFT_STAGES
    assert list(parts.values()) == pytest.approx([1.0, 3.0, 0.5, 0.5])
    assert sum(parts.values()) == pytest.approx(5.0)


def test_nothing_is_exposed_if_the_last_page_came_before_prefills_last_word() -> None:
    parts = told((1.0, Stage.RESERVED), (3.0, Stage.ARRIVED), (4.0, Stage.PREFILLED), (4.25, Stage.ADMITTED))
    assert list(parts.values()) == pytest.approx([1.0, 3.0, 0.0, 0.25])


def test_a_request_that_was_not_admitted_has_no_parts_and_is_forgotten() -> None:
    timeline = Timeline()
    timeline.begin(R)
    timeline.hook(Stage.RESERVED, R)
    assert timeline.end(R) == {}
    assert timeline._of == {}
    assert timeline.end(R) == {}


def test_of_others_nothing_is_noted() -> None:
    timeline = Timeline()
    timeline.hook(Stage.ADMITTED, R)
    assert timeline._of == {}


def test_a_second_request_of_an_id_is_nobodys_time() -> None:
    timeline = Timeline()
    assert timeline.begin(R)
    assert not timeline.begin(R)


def test_a_request_that_runs_tells_how_far_it_is() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin(R)
    clock.now_s = 101.0
    assert timeline.so_far(R) == {"queue": 1.0}
    for at_s, stage in WHOLE:
        clock.now_s = 100.0 + at_s
        timeline.hook(stage, R)
        if stage is Stage.ARRIVED and at_s == 2.0:
            clock.now_s = 103.5
            assert timeline.so_far(R) == pytest.approx({"queue": 1.0, "prefill": 2.5})
        elif stage is Stage.PREFILLED:
            clock.now_s = 104.25
            assert timeline.so_far(R) == pytest.approx({"queue": 1.0, "prefill": 3.0, "exposed_transfer": 0.25})
    so_far = timeline.so_far(R)
    assert so_far == timeline.end(R)
    assert tuple(so_far) == TTFT_STAGES
