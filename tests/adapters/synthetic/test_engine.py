"""An engine without a model is still one whose pages can be told apart."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pdkv.adapters.synthetic.engine import SyntheticEngine, SyntheticModel, synthetic_model
from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool

TOKENS = np.random.default_rng(0).integers(0, 256, 200).astype(np.uint32)
PAGES = LocalPages.checked(np.array([3, 1, 5, 2], np.int32), 8)
SHAPE = model_shape(load_config("tiny"))


def made(seed: int = 0) -> tuple[SlotPool, SyntheticEngine]:
    pool = SlotPool.create(page_format(SHAPE), 8)
    return pool, SyntheticEngine(synthetic_model("tiny", seed=seed), pool)


def test_steps_of_any_length_write_the_same_pages() -> None:
    (whole, one), (parts, two) = made(), made()
    last = one.forward(TOKENS, 0, PAGES)
    for start in (0, 64, 100, 199):
        stop = {0: 64, 64: 100, 100: 199, 199: 200}[start]
        again = two.forward(TOKENS[start:stop], start, PAGES)
    assert (digest_pages(whole, PAGES) == digest_pages(parts, PAGES)).all()
    assert int(last.argmax()) == int(again.argmax())


def test_every_segment_of_a_page_is_written() -> None:
    pool, engine = made()
    engine.forward(TOKENS[:64], 0, PAGES)
    for segment, raw in zip(
        pool.fmt.segments, [raw for group in Group for raw in pool.group_bytes(3, group)], strict=True
    ):
        assert np.frombuffer(raw, np.uint8).all(), segment.name


def test_pages_of_other_tokens_places_and_seeds_differ() -> None:
    pool, engine = made()
    engine.forward(TOKENS[:64], 0, PAGES)
    engine.forward(TOKENS[:64], 64, PAGES)
    other, another = made(seed=1)
    another.forward(TOKENS[:64], 0, PAGES)
    digests = {tuple(d) for p in (pool, other) for d in digest_pages(p, PAGES[:2]).tolist()}
    assert len(digests) == 4  # the second page of `other` was never written


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
def test_a_wrong_byte_in_the_last_page_changes_the_answer(layer: int) -> None:
    pool, engine = made()
    engine.forward(TOKENS, 0, PAGES)
    right = [int(engine._logits(200, PAGES).argmax())]
    pool.main_view(layer)[2, 3, 7] ^= 1
    assert [int(engine._logits(200, PAGES).argmax())] != right


def test_verify_says_what_steps_say() -> None:
    (_, one), (_, two) = made(), made()
    one.forward(TOKENS[:100], 0, PAGES)
    two.forward(TOKENS[:100], 0, PAGES)
    rows = one.verify(TOKENS[100:104], 100, PAGES).logits
    assert [int(r.argmax()) for r in rows] == [
        int(two.forward(TOKENS[i : i + 1], i, PAGES).argmax()) for i in range(100, 104)
    ]
    assert one.chunk(TOKENS[104:110], 104, PAGES).hidden.shape == (6, 0)


def test_too_few_pages() -> None:
    with pytest.raises(BoundsError, match="positions"):
        made()[1].forward(TOKENS, 64, PAGES[:1])


def test_pages_that_need_a_model_are_refused() -> None:
    shape = model_shape(load_config("tiny"), draft_layers=1)
    with pytest.raises(ConfigError, match="reference"):
        SyntheticEngine(SyntheticModel(shape, 0), SlotPool.create(page_format(shape), 4))


def test_pages_of_another_list_or_seed_have_another_name() -> None:
    assert synthetic_model("tiny").weights_id != synthetic_model("tiny", seed=1).weights_id
    types = ("full",) * SHAPE.num_layers
    assert synthetic_model("tiny", indexer_types=types).shape.indexer_types == types


def test_a_step_takes_as_long_as_a_models_would() -> None:
    pool = SlotPool.create(page_format(SHAPE), 8)
    engine = SyntheticEngine(synthetic_model("tiny"), pool, token_us=500)
    _, plain = made()
    began_s = time.monotonic()
    logits = engine.forward(TOKENS, 0, PAGES)
    assert time.monotonic() - began_s >= 200 * 500e-6
    assert (logits == plain.forward(TOKENS, 0, PAGES)).all()
