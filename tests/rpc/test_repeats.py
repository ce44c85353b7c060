"""What is said once, again, and never forgotten for what came later."""

from __future__ import annotations

from pdkv.rpc.repeats import EVERY_S, KEPT, Repeats
from tests.router.fleet import Clock


def test_equal_words_are_a_line_a_minute_with_their_number() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    assert [repeats.line("a") for _ in range(3)] == ["a", "", ""]
    assert repeats.line("b") == "b"
    clock.now_s += EVERY_S
    assert [repeats.line("a") for _ in range(2)] == ["a (2 times more before)", ""]
    clock.now_s += EVERY_S
    assert repeats.line("b") == "b"


def test_as_many_are_remembered_as_may_be_the_latest() -> None:
    repeats = Repeats(Clock())
    words = [str(number) for number in range(KEPT + 1)]
    assert [repeats.line(each) for each in words] == words
    assert repeats.line(words[1]) == "", "it is among the latest"
    assert repeats.line(words[0]) == words[0], "it was forgotten"
    assert len(repeats._told) == KEPT
