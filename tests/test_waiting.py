"""What other tests wait with: it returns when the thing is there, and says so when it never is."""

import asyncio
import os
import subprocess
import sys

import pytest

from tests.waiting import PAUSE_S, children_of, until, until_ended

ECHO = [sys.executable, "-c", "import sys; sys.stdin.read()"]


async def counting(answers: list[int]) -> int:
    answers.append(len(answers))
    return answers[-1]


def test_the_answer_that_holds_is_returned() -> None:
    answers: list[int] = []
    assert asyncio.run(until(lambda: counting(answers), lambda n: n == 3, "three")) == 3
    assert answers == [0, 1, 2, 3]


def test_a_thing_that_never_comes_is_named() -> None:
    with pytest.raises(AssertionError, match=r"four: not within 0\.05 s; last: \d+"):
        asyncio.run(until(lambda: counting([]), lambda n: n == 4, "four", deadline_s=0.05))


def test_it_leaves_the_processor_to_others() -> None:
    answers: list[int] = []
    with pytest.raises(AssertionError, match="never"):
        asyncio.run(until(lambda: counting(answers), lambda n: False, "never", deadline_s=10 * PAUSE_S))
    assert len(answers) <= 11


def test_processes_are_found_and_waited_for() -> None:
    with subprocess.Popen(ECHO, stdin=subprocess.PIPE) as process:
        assert process.pid in children_of(os.getpid())
        with pytest.raises(AssertionError, match=f"still running after 0.05 s: .{process.pid}"):
            until_ended([process.pid], deadline_s=0.05)
        assert process.stdin is not None
        process.stdin.close()
        until_ended([process.pid])
    until_ended([process.pid])
