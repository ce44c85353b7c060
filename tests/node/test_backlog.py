"""What a prefill node still has to compute."""

import pytest

from pdkv.node.backlog import Backlog


def test_prompts_count_until_they_are_computed_or_gone() -> None:
    backlog = Backlog()
    with backlog.taken_on(1000) as first:
        with backlog.taken_on(300) as second:
            assert backlog.tokens == 1300
            first(640)
            assert backlog.tokens == 660
            second(400)
            assert backlog.tokens == 360, "nobody computes more than there was"
        assert backlog.tokens == 360
        with pytest.raises(ValueError, match="failed"), backlog.taken_on(500):
            raise ValueError("failed")
        assert backlog.tokens == 360
    assert backlog.tokens == 0
