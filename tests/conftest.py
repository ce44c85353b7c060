"""Settings that every test shares."""

import signal

import pytest
from hypothesis import settings

# what is started in the background of a shell ignores Ctrl-C, and so would all processes that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
# a shared machine makes single examples slow without making them wrong
settings.register_profile("pdkv", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile("pdkv")


LONGEST_FIRST = (
    "tests/cli/demo/test_run.py",
    "tests/e2e/",
    "tests/simulation/",
    "tests/cli/bench/",
    "tests/adapters/reference/",
    "tests/kvcache/",
    "tests/node/",
)
"""A file that takes a minute and begins last would keep one worker busy and the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


def place(test: str) -> int:
    """Of the first that it begins with in `LONGEST_FIRST`; of what is in none of them, behind all."""
    return next((at for at, start in enumerate(LONGEST_FIRST) if test.startswith(start)), len(LONGEST_FIRST))
