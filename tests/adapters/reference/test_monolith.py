"""One process: what it answers is what its engine computes, and a cache changes nothing but the work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.monolith import Monolith
from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import BoundsError, NeverFits
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Sampling
from pdkv.node.ports import Logits
from pdkv.node.sampling import logits_digest, sample
from tests.adapters.reference.runs import Run
from tests.node.toy import ToyEngine

CHUNK = 128
SHAPE = model_shape(load_config("tiny"))
FMT = page_format(SHAPE)
GREEDY = Sampling(max_tokens=4)


def contract(**facts: Any) -> Contract:
    return build_contract(SHAPE, FMT, identity=ContractFacts(weights_id="toy", **facts))


def toy(pages: int = 64, **facts: Any) -> tuple[Monolith, ToyEngine]:
    pool = SlotPool.create(FMT, pages)
    engine = ToyEngine(pool)
    return Monolith(engine, pool, contract(**facts), CHUNK), engine


def tokens_of(length: int, seed: int = 0) -> UInt32Array:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)


def test_it_answers_what_its_engine_computes(
    tiny: LoadedModel, run: Callable[..., Run], prompt: Callable[[int], UInt32Array]
) -> None:
    tokens = prompt(300)
    pool = SlotPool.create(page_format(tiny.shape), 16)
    answer = Monolith(ReferenceEngine(tiny, pool), pool, contract(), CHUNK).generate(tokens, Sampling(max_tokens=6))
    by_hand = run(page_seed=3)
    first = by_hand.prefill(tokens, CHUNK)
    drawn, after = by_hand.decode(first, len(tokens), 6)
    assert answer.tokens == tuple(drawn)
    # the logits after the last token are nobody's
    assert answer.logits_digests == tuple(logits_digest(logits) for logits in [first, *after[:-1]])
    assert (answer.chunk_starts, answer.pages_hit) == ((0, 128, 256), 0)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 500])
def test_steps_are_chunks_and_then_single_tokens(length: int) -> None:
    monolith, engine = toy()
    answer = monolith.generate(tokens_of(length), GREEDY)
    starts = list(range(0, length, CHUNK))
    prefill = [(start, min(start + CHUNK, length)) for start in starts]
    assert engine.steps == prefill + [(at, at + 1) for at in range(length, length + 3)]
    assert answer.chunk_starts == tuple(starts)
    assert len(answer.tokens) == len(answer.logits_digests) == 4


@pytest.mark.parametrize("length", [1, 64, 65, 128, 500])
def test_what_is_cached_is_not_computed_and_changes_nothing(length: int) -> None:
    monolith, engine = toy()
    first = monolith.generate(tokens_of(length), GREEDY)
    engine.steps.clear()
    again = monolith.generate(tokens_of(length), GREEDY)
    # at least one token is left to compute: its logits are wanted
    assert again.pages_hit == (length - 1) // 64
    assert engine.steps[0] == (again.pages_hit * 64, min(again.pages_hit * 64 + CHUNK, length))
    assert (again.tokens, again.logits_digests) == (first.tokens, first.logits_digests)


def test_a_page_given_back_by_rule_is_computed_again() -> None:
    monolith, _ = toy(speculation="eagle", eagle_rule="drop_page")
    monolith.generate(tokens_of(500), GREEDY)
    assert monolith.generate(tokens_of(500), GREEDY).pages_hit == 500 // 64 - 1


def test_tokens_are_drawn_as_a_node_draws_them() -> None:
    sampling = Sampling(max_tokens=4, temperature=0.9, top_p=0.95, seed=11)
    logits: list[Logits] = []

    class Noted(ToyEngine):
        def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
            logits.append(super().forward(tokens, start, pages))
            return logits[-1]

    pool = SlotPool.create(FMT, 8)
    answer = Monolith(Noted(pool), pool, contract(), CHUNK).generate(tokens_of(100), sampling)
    drawn = [sample(one, sampling, 100 + i).token for i, one in enumerate(logits)]
    assert answer.tokens == tuple(drawn)
    assert answer.tokens != toy()[0].generate(tokens_of(100), GREEDY).tokens


def test_a_stop_token_is_the_last() -> None:
    free = toy()[0].generate(tokens_of(100), GREEDY).tokens
    for place, stop in enumerate(free):
        if stop in free[:place]:
            continue
        stopped = toy()[0].generate(tokens_of(100), Sampling(max_tokens=4, stop_tokens=(stop,)))
        assert stopped.tokens == free[: place + 1]


def test_everything_is_given_back_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one request only, so that a page kept is a request refused."""
    monolith, engine = toy(pages=1 + 3)

    def broken(*_: object) -> Logits:
        raise BoundsError("a step", 1, "none")

    for seed in range(5):
        assert len(monolith.generate(tokens_of(150, seed), GREEDY).tokens) == 4
        with monkeypatch.context() as patch:
            patch.setattr(engine, "forward", broken)
            with pytest.raises(BoundsError, match="a step"):
                monolith.generate(tokens_of(151, seed), GREEDY)
    with pytest.raises(NeverFits):
        monolith.generate(tokens_of(190), GREEDY)


def test_a_prompt_of_nothing_or_of_strange_tokens_is_named() -> None:
    monolith, _ = toy()
    for tokens, what in (([], "prompt tokens"), ([SHAPE.vocab_size], "token id")):
        with pytest.raises(BoundsError, match=what):
            monolith.generate(np.array(tokens, np.uint32), GREEDY)


@pytest.mark.parametrize("caches", [True, False])
def test_its_own_answers_are_cache_only_if_it_is_told_so(*, caches: bool) -> None:
    (monolith, _), (cold, _) = toy(), toy()
    monolith.caches_answers = caches
    tokens = tokens_of(100)
    first = monolith.generate(tokens, Sampling(max_tokens=100))
    longer = np.concatenate((tokens, np.array(first.tokens), tokens_of(30, seed=1))).astype(np.uint32)
    again = monolith.generate(longer, GREEDY)
    # the last token of an answer has no row
    assert again.pages_hit == ((100 + 100 - 1) // 64 if caches else 1)
    alone = cold.generate(longer, GREEDY)
    assert (again.tokens, again.logits_digests) == (alone.tokens, alone.logits_digests)
