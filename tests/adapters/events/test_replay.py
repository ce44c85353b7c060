"""The replay buffer: newest batches, in a row, within both bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.adapters.events.replay import ReplayBuffer


@given(
    sizes=st.lists(st.integers(1, 20), max_size=30),
    max_batches=st.integers(1, 8),
    max_bytes=st.integers(1, 60),
    since=st.integers(0, 40),
)
def test_the_newest_in_a_row(sizes: list[int], max_batches: int, max_bytes: int, since: int) -> None:
    buffer, all_ = ReplayBuffer(max_batches, max_bytes), []
    for number, size in enumerate(sizes):
        assert buffer.next_sequence == number
        all_.append((number, bytes([number]) * size))
        buffer.append(all_[-1][1])
    kept = [*buffer.since(0)]
    assert kept == all_[len(all_) - len(kept) :]
    assert [*buffer.since(since)] == [each for each in kept if each[0] >= since]
    assert len(kept) <= max_batches
    held = sum(len(payload) for _, payload in kept)
    assert held <= max_bytes or len(kept) == 1
    if len(kept) < len(all_):  # as many as fit
        dropped = len(all_[len(all_) - len(kept) - 1][1])
        assert len(kept) == max_batches or held + dropped > max_bytes


@pytest.mark.parametrize("since", [0, 5, 1 << 63])
def test_nothing_from_an_empty_one(since: int) -> None:
    assert [*ReplayBuffer(3, 100).since(since)] == []
