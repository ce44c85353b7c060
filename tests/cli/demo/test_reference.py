"""One process's answers, in the order in which they were asked for."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdkv.cli.demo.reference import Reference
from pdkv.config import PrefillConfig
from pdkv.errors import BoundsError, ConfigError
from pdkv.node.messages import Sampling

CONFIG = PrefillConfig(model="tiny", chunk_tokens=64, threads=1, pool_pages=32)
TOKENS = np.arange(150, dtype=np.uint32)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reference() -> Iterator[Reference]:
    made = Reference(CONFIG)
    yield made
    made.close()


def test_answers_come_in_the_order_of_the_questions(reference: Reference) -> None:
    async def body() -> None:
        # the first one finds no model yet, and the others wait for it
        first, again, longer = await asyncio.gather(
            reference.ask(TOKENS, Sampling(max_tokens=4)),
            reference.ask(TOKENS, Sampling(max_tokens=4)),
            reference.ask(np.concatenate((TOKENS, TOKENS)), Sampling(max_tokens=2)),
        )
        assert (first.pages_hit, again.pages_hit, longer.pages_hit) == (0, 2, 2)
        assert first.tokens == again.tokens
        assert (first.chunk_starts, again.chunk_starts, longer.chunk_starts) == ((0, 64, 128), (128,), (128, 192, 256))
        assert len(longer.tokens) == len(longer.logits_digests) == 2

    asyncio.run(body())


def test_a_question_that_cannot_be_answered_ends_only_itself(reference: Reference) -> None:
    async def body() -> None:
        with pytest.raises(BoundsError, match="token id: 999"):
            await reference.ask(np.array([999], np.uint32), Sampling())
        assert len((await reference.ask(TOKENS, Sampling(max_tokens=3))).tokens) == 3

    asyncio.run(body())


def test_a_model_that_is_not_there_is_named() -> None:
    reference = Reference(CONFIG.model_copy(update={"model": "glm-9"}))
    with pytest.raises(ConfigError, match="model: 'glm-9'"):
        asyncio.run(reference.ask(TOKENS, Sampling()))
    reference.close()
