"""The draft head: what its rows depend on, what must not be lost of it, and pages whose identity covers a lookahead."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.adapters.reference import mtp as mtp_file
from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel, load_model
from pdkv.adapters.reference.monolith import Monolith, MonolithAnswer
from pdkv.adapters.reference.mtp import MtpDrafter
from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import BoundsError, ConfigError, MissingDependency
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import DraftHandoff, Sampling
from pdkv.node.ports import DraftAsk, Drafts
from pdkv.node.prompt import draft_digest
from tests.adapters.reference.runs import Run

Prompt = Callable[[int], np.ndarray]
DRAFT = 8
"""Number of the draft layer: the preset has layers 0 to 7."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny", draft_layers=1)


class Drafting(Run):
    """A sequence with its draft rows."""

    def __init__(self, model: LoadedModel, *, page_seed: int = 0, sharing: bool = False) -> None:
        super().__init__(model, SlotPool.create(page_format(model.shape), 12), page_seed=page_seed, pages=11)
        self.drafter = MtpDrafter(model, self.pool, index_sharing=sharing)

    def prompt(self, tokens: np.ndarray, after: int, chunk: int = 1024) -> tuple[np.ndarray, DraftHandoff]:
        """Hidden states of the last chunk, and the state after the prompt and the token `after` it."""
        following = np.append(tokens[1:], np.uint32(after))
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            computed = self.engine.chunk(tokens[part], start, self.pages)
            state = self.drafter.extend(computed.hidden, following[part], start, self.pages)
        return computed.hidden, state

    def drafts(self, state: DraftHandoff, token: int, place: int, count: int = 3) -> Drafts:
        return self.drafter.propose(DraftAsk(token, place, count, Sampling(), state), self.pages)


def contract_of(model: LoadedModel, **facts: Any) -> Contract:
    mtp = {"speculation": "mtp", "eagle_rule": "bigram", "draft_tokens": 3, "rollback_tokens": 3, "draft_topk": 1}
    identity = ContractFacts(model.weights_id, **{**mtp, **facts})
    return build_contract(model.shape, page_format(model.shape), identity=identity)


def process(model: LoadedModel, contract: Contract, *, drafting: bool = True, chunk: int = 64) -> Monolith:
    pool = SlotPool.create(page_format(model.shape), 40)
    drafter = MtpDrafter(model, pool, index_sharing=contract.index_sharing) if drafting else None
    return Monolith(ReferenceEngine(model, pool), pool, contract, chunk, drafter)


# --- it says what plain decoding says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=16), Sampling(max_tokens=8, temperature=0.8, seed=2)])
@pytest.mark.parametrize("sharing", [False, True])
def test_tokens_and_logits_are_those_of_plain_decoding(
    model: LoadedModel, prompt: Prompt, sampling: Sampling, sharing: bool
) -> None:
    contract = contract_of(model, index_sharing=sharing)
    got = process(model, contract).generate(prompt(70), sampling)
    plain = process(model, contract, drafting=False).generate(prompt(70), sampling)
    assert (got.tokens, got.logits_digests) == (plain.tokens, plain.logits_digests)
    assert got.speculation is not None
    assert got.speculation.rolled_back_tokens > 0


def test_some_drafts_are_right(model: LoadedModel, prompt: Prompt) -> None:
    """Few: nothing is trained. But none at all is what a head with broken inputs gets."""
    got = process(model, contract_of(model)).generate(prompt(70), Sampling(max_tokens=48)).speculation
    assert got is not None
    assert 2 <= got.accepted < got.drafted / 4


# --- what a row depends on --------------------------------------------------------------------------------------------


def test_a_draft_depends_on_hidden_state_next_token_and_rows_of_both_caches(model: LoadedModel, prompt: Prompt) -> None:
    tokens = prompt(100)
    here = Drafting(model)
    hidden, _ = here.prompt(tokens, 7)

    def again(hidden: np.ndarray, after: int, spoil: Callable[[SlotPool, int], None] = lambda *_: None) -> int:
        other = Drafting(model, page_seed=4)
        here.copy_to(other, 2)
        spoil(other.pool, int(other.pages.array[0]))
        return other.drafter.extend(hidden[-1:], np.array([after], np.uint32), 99, other.pages).logits_digest

    def spoil_main(pool: SlotPool, page: int) -> None:
        pool.main_view(DRAFT)[page, 3:60] = 0

    def spoil_index(pool: SlotPool, page: int) -> None:
        pool.index_view(DRAFT)[page] = 0

    want = again(hidden, 7)
    assert want == again(hidden, 7)
    changed = {again(hidden * np.float32(1.01), 7), again(hidden, 8), again(hidden, 7, spoil_main)}
    changed |= {again(hidden, 7, spoil_index), again(np.zeros_like(hidden), 7)}
    assert len(changed | {want}) == 6


def test_only_draft_rows_of_the_given_positions_are_written(model: LoadedModel) -> None:
    run = Drafting(model)
    run.drafter.extend(np.ones((5, 128), np.float32), np.arange(5, dtype=np.uint32), 62, run.pages)
    at = [(int(run.pages.array[i // 64]), i % 64) for i in range(62, 67)]
    for segment in run.pool.fmt.segments:
        view = run.pool.main_view(segment.layer) if segment.group is Group.MAIN else run.pool.index_keys(segment.layer)
        written = {(page, slot) for page, slot in np.argwhere(view.numpy().any(axis=-1)).tolist()}
        assert written == (set(at) if segment.name.startswith("draft_") else set())


def test_chunks_and_one_piece_give_close_rows(model: LoadedModel, prompt: Prompt) -> None:
    whole, parts = Drafting(model).prompt(prompt(150), 7)[1], Drafting(model).prompt(prompt(150), 7, 64)[1]
    assert np.allclose(whole.hidden, parts.hidden, atol=0.05)


def test_its_selection_is_shared_only_when_told_so(model: LoadedModel, prompt: Prompt) -> None:
    run, sharing = Drafting(model), Drafting(model, sharing=True)
    own, shared = run.prompt(prompt(150), 7)[1], sharing.prompt(prompt(150), 7)[1]
    assert own.index_seed.shape == (0,)
    assert own.logits_digest == shared.logits_digest
    assert len(set(shared.index_seed.tolist())) == 64
    assert 0 <= shared.index_seed.min() < shared.index_seed.max() < 150
    short = Drafting(model, sharing=True).prompt(prompt(20), 7)[1]
    assert short.index_seed.tolist() == [*range(20), *[-1] * 44]
    assert run.drafts(own, 7, 150).logits_digests[1:] != sharing.drafts(shared, 7, 150).logits_digests[1:]


# --- what the hand-off must bring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["hidden", "tokens", "index_seed"])
def test_a_lost_part_of_the_state_changes_drafts_and_its_digest(model: LoadedModel, prompt: Prompt, lost: str) -> None:
    run = Drafting(model, sharing=True)
    state = run.prompt(prompt(150), 7)[1]
    column = getattr(state, lost)
    empty = replace(state, **{lost: np.full_like(column, -1) if lost == "index_seed" else np.zeros_like(column)})
    want, got = run.drafts(state, 7, 150), run.drafts(empty, 7, 150)
    assert run.drafts(state, 7, 150).logits_digests == want.logits_digests
    assert got.logits_digests[1:] != want.logits_digests[1:]
    assert draft_digest(empty) != draft_digest(state)


def test_candidates_come_best_first_with_their_probabilities(model: LoadedModel, prompt: Prompt) -> None:
    run = Drafting(model)
    one = run.prompt(prompt(70), 7)[1]
    run.drafter = MtpDrafter(model, run.pool, topk=4)
    four = run.prompt(prompt(70), 7)[1]
    assert four.tokens.shape == four.probabilities.shape == (4,)
    assert four.tokens[0] == one.tokens[0]
    assert (np.diff(four.probabilities) <= 0).all()
    assert 0 < four.probabilities.sum() < 1


# --- a page's identity covers the token after it ----------------------------------------------------------------------


def continued(model: LoadedModel, contract: Contract, prompt: Prompt) -> tuple[MonolithAnswer, MonolithAnswer]:
    """One page, two continuations that differ from its very next token on: the second in a process that has served the
    first, and in one that has not. The chunks are the same, so all bits may be.
    """
    page = prompt(64)
    first, second = (np.concatenate((page, [token], prompt(5))).astype(np.uint32) for token in (65, 90))
    served, fresh = process(model, contract), process(model, contract)
    served.generate(first, Sampling(max_tokens=2))
    sampling = Sampling(max_tokens=6)
    return served.generate(second, sampling), fresh.generate(second, sampling)


def test_one_prefix_with_two_continuations_drafts_as_without_cache(model: LoadedModel, prompt: Prompt) -> None:
    with_cache, without = continued(model, contract_of(model), prompt)
    assert with_cache.pages_hit == 0
    assert with_cache.draft_digests == without.draft_digests
    assert any(without.draft_digests)


def test_with_a_plain_chain_it_would_not(model: LoadedModel, prompt: Prompt) -> None:
    """The negative control: a contract refuses this, and this is why. No token and no target logit shows it."""
    with pytest.raises(ConfigError, match="bigram"):
        contract_of(model, eagle_rule="none")
    plain = replace(contract_of(model), bigram=False, eagle_rule="none")
    with_cache, without = continued(model, plain, prompt)
    assert with_cache.pages_hit == 1
    assert with_cache.tokens == without.tokens
    assert with_cache.logits_digests == without.logits_digests
    assert with_cache.draft_digests != without.draft_digests


def test_a_hit_brings_the_draft_rows_along(model: LoadedModel, prompt: Prompt) -> None:
    tokens = np.concatenate((prompt(64), prompt(80))).astype(np.uint32)
    served, fresh = process(model, contract_of(model)), process(model, contract_of(model))
    served.generate(tokens[:100], Sampling(max_tokens=2))
    again, alone = (p.generate(tokens, Sampling(max_tokens=6)) for p in (served, fresh))
    assert (again.pages_hit, alone.pages_hit) == (1, 0)
    assert again.draft_digests == alone.draft_digests
    assert again.logits_digests == alone.logits_digests


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused(model: LoadedModel, tiny: LoadedModel) -> None:
    pool = SlotPool.create(page_format(model.shape), 4)
    with pytest.raises(ConfigError, match="draft_layers"):
        MtpDrafter(tiny, pool)
    with pytest.raises(ConfigError, match="index_sharing"):
        MtpDrafter(model, pool, topk=2, index_sharing=True)
    drafter, pages = MtpDrafter(model, pool), LocalPages.checked([1, 2], 4)
    with pytest.raises(BoundsError, match="hidden states"):
        drafter.extend(np.zeros((2, 128), np.float32), np.zeros(1, np.uint32), 0, pages)
    with pytest.raises(BoundsError, match="hidden states"):
        drafter.extend(np.zeros((0, 128), np.float32), np.zeros(0, np.uint32), 0, pages)
    with pytest.raises(BoundsError, match="draft state"):
        drafter.propose(DraftAsk(1, 1, 2, Sampling(), None), pages)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "transformers" or n.startswith("transformers.")]:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("without_transformers", mtp_file.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(MissingDependency, match=r"pip install '\.\[reference\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
