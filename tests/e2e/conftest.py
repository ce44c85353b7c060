"""The fleet that all of these tests share: starting it is most of their time."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        made = World(runner)
        try:
            made.run(made.open())
            yield made
        finally:
            made.run(made.close())
