"""How long the transfer thread sleeps between two looks, without a thread and without a clock."""

from __future__ import annotations

import pytest

from pdkv.transfer import engine
from pdkv.transfer.orders import TransferSettings


def test_pace_spins_then_sleeps_twice_as_long_each_time() -> None:
    pace = engine._Pace(TransferSettings(idle_s=0.003, reading_s=0.0005))
    pace.moved(10.0)
    assert pace.rest(10.0 + engine.SPIN_S / 2, reading=False) == 0.0
    waits = [pace.rest(11.0, reading=False) for _ in range(8)]
    assert waits[:3] == [engine.FIRST_SLEEP_S * 2**i for i in range(3)]
    assert waits[-1] == 0.003
    assert pace.rest(11.0, reading=True) == 0.0005
    pace.moved(12.0)
    assert pace.rest(12.0, reading=False) == 0.0


def test_a_thread_with_nothing_left_to_read_rests_at_once() -> None:
    settings = TransferSettings()
    pace = engine._Pace(settings)
    pace.moved(10.0)
    assert pace.rest(10.0001, reading=True) == 0.0
    assert [pace.rest(10.1, reading=True) for _ in range(5)] == pytest.approx([5e-5, 1e-4, 2e-4, 4e-4, 5e-4])
    pace.moved(11.0)
    pace.ended()
    assert pace.rest(11.0001, reading=False) == settings.idle_s
    pace.rest(12.0, reading=True)
    pace.flowed(12.0, engine.MORE_S / 2)
    pace.ended()
    assert pace.rest(12.0001, reading=False) == settings.reading_s, "a peer still reads from here"


def test_bytes_that_flow_are_looked_at_every_so_often_and_many_at_once() -> None:
    pace = engine._Pace(TransferSettings(idle_s=0.005, reading_s=0.0005))
    pace.flowed(10.0, engine.MORE_S * 2)
    assert pace.rest(10.0, reading=False) == 0.0
    assert [pace.rest(10.0 + engine.FLOWING_S * 0.9, reading=False) for _ in range(9)] == [0.0005] * 9
    later = [pace.rest(10.0 + engine.FLOWING_S * 1.1, reading=False) for _ in range(5)]
    assert later == pytest.approx([0.001, 0.002, 0.004, 0.005, 0.005])


def test_a_look_after_a_long_sleep_may_only_be_cold() -> None:
    """On a busy machine it costs as much as bytes do: an idle thread would never sleep long again."""
    settings = TransferSettings(idle_s=0.005, reading_s=0.0005)
    little = engine.MORE_S / 2

    def idle() -> engine._Pace:
        pace = engine._Pace(settings)
        while pace.rest(10.0, reading=False) < settings.idle_s:
            pass
        return pace

    alone = idle()
    alone.flowed(11.0, little)
    assert alone.rest(11.0, reading=False) == settings.reading_s
    assert [alone.rest(11.001 * n, reading=False) for n in (1, 2, 3, 4)] == pytest.approx([0.001, 0.002, 0.004, 0.005])
    flowing = idle()
    for _ in range(2):
        flowing.flowed(11.0, little)
        assert flowing.rest(11.0, reading=False) == settings.reading_s
    assert flowing.rest(11.0 + engine.FLOWING_S * 0.9, reading=False) == settings.reading_s
    much = idle()
    for _ in range(2):
        much.flowed(11.0, engine.MORE_S * 2)
        assert much.rest(11.0, reading=False) == 0.0
    assert much.rest(11.0 + engine.FLOWING_S * 0.9, reading=False) == settings.reading_s


def test_bytes_of_own_reads_are_forgotten_with_them() -> None:
    settings = TransferSettings(idle_s=0.005, reading_s=0.0005)
    pace = engine._Pace(settings)
    pace.came(engine.MORE_S * 2)
    assert [pace.rest(10.0, reading=True) for _ in range(3)] == [0.0, 0.0005, 0.0005]
    pace.came(engine.MORE_S / 2)
    pace.ended()
    assert pace.rest(10.001, reading=False) == settings.idle_s
