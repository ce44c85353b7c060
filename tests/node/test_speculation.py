"""Speculation says what plain decoding says, leaves nothing behind, and notices what a hand-off can lose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.adapters.reference.monolith import Monolith, MonolithAnswer
from pdkv.errors import AccountMismatch, ContractMismatch, DigestMismatch
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.answer import Answer
from pdkv.node.messages import (
    GenerateDone,
    GenerateRequest,
    Sampling,
    Speculation,
    Token,
)
from pdkv.node.ports import DraftAsk, Drafts
from pdkv.node.speculation import Decoder, canary, roll_back
from tests.kvcache.pools import all_pages, random_pool, tiny_format
from tests.node.scene import alone, answers, recovered, request, rested, run
from tests.node.toy import CHUNK, PAGE, Pair, ToyEngine, make_pair, toy_drafter

ORACLE: dict[str, Any] = {"speculation": "oracle", "draft_tokens": 3, "rollback_tokens": 3}
MTP: dict[str, Any] = {
    "speculation": "mtp",
    "eagle_rule": "bigram",
    "draft_tokens": 3,
    "rollback_tokens": 3,
    "draft_topk": 1,
}
SHARED = {**MTP, "index_sharing": True}
SAMPLINGS = (
    Sampling(max_tokens=40),
    Sampling(max_tokens=40, temperature=0.9, top_p=0.95, seed=5),
    Sampling(max_tokens=1),
    Sampling(max_tokens=2),
    Sampling(max_tokens=5),
)


def asking(length: int, sampling: Sampling, name: str = "r0", **more: Any) -> GenerateRequest:
    return replace(request(length, name=name), sampling=sampling, want_logits=True, **more)


async def heard(pair: Pair, asked: GenerateRequest) -> tuple[list[Token], GenerateDone]:
    events = [event async for event in pair.decode.generate(asked)]
    done = events.pop()
    assert isinstance(done, GenerateDone)
    return [event for event in events if isinstance(event, Token)], done


def in_one_process(pair: Pair, *asked: GenerateRequest) -> list[MonolithAnswer]:
    """The same requests, speculation included, with a pool of its own."""
    contract = pair.prefill.parts.contract
    pool = SlotPool.create(pair.decode.parts.pool.fmt, 64)
    engine = ToyEngine(pool)
    process = Monolith(engine, pool, contract, CHUNK, toy_drafter(engine, contract))
    return [process.generate(one.tokens, one.sampling) for one in asked]


# --- the answer is the plain one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [ORACLE, MTP, SHARED], ids=["oracle", "mtp", "shared index"])
def test_tokens_and_their_logits_are_those_of_plain_decoding(facts: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        for number, sampling in enumerate(SAMPLINGS):
            for length in (1, PAGE - 2, PAGE, 2 * PAGE, 300):
                asked = asking(length, sampling, f"r{number}-{length}")
                tokens, done = await heard(pair, asked)
                assert tuple(t.token for t in tokens) == alone(pair, asked)
                assert [t.index for t in tokens] == list(range(len(tokens)))
                (one,) = in_one_process(pair, asked)
                assert tuple(t.logits_digest for t in tokens) == one.logits_digests
                assert tuple(t.draft_digests for t in tokens) == one.draft_digests
                assert done.speculation == one.speculation
        await recovered(pair)

    run(scenario, make_pair(both=facts))


def test_an_oracles_drafts_are_accepted_and_rolled_back() -> None:
    async def scenario(pair: Pair) -> None:
        tokens, done = await heard(pair, asking(200, Sampling(max_tokens=120)))
        count = done.speculation
        assert count is not None
        assert len(tokens) == 120
        assert count.accepted > 40
        assert count.rolled_back_tokens == count.drafted - count.accepted > 10
        assert count.drafted <= 3 * count.steps
        assert count.accepted + count.steps in (118, 119)  # one step may have had no room for a draft
        assert 1 + count.accepted / count.steps == count.mean_accepted_length > 1.5
        assert 0.3 < count.acceptance_rate < 0.9
        assert count.canary == ""

    run(scenario, make_pair(both=ORACLE))


def test_a_stop_token_ends_it_where_plain_decoding_ends() -> None:
    async def scenario(pair: Pair) -> None:
        plain = alone(pair, asking(150, Sampling(max_tokens=40)))
        for at in range(1, 12):
            sampling = Sampling(max_tokens=40, stop_tokens=(plain[at],))
            tokens, done = await heard(pair, asking(150, sampling, f"r{at}"))
            want = plain[: plain.index(plain[at]) + 1]
            assert (tuple(t.token for t in tokens), done.finish_reason) == (want, "stop")
        await recovered(pair)

    run(scenario, make_pair(both=ORACLE))


def test_two_at_a_time_do_not_mix_their_drafts() -> None:
    async def scenario(pair: Pair) -> None:
        import asyncio

        asked = [
            asking(
                150 + 70 * i,
                Sampling(max_tokens=30),
                f"r{i}",
            )
            for i in range(4)
        ]
        got = await asyncio.gather(*(heard(pair, one) for one in asked))
        for (tokens, _), one in zip(got, asked, strict=True):
            assert tuple(t.token for t in tokens) == alone(pair, one)
        await recovered(pair)

    run(scenario, make_pair(both=MTP))


# --- roll-back --------------------------------------------------------------------------------------------------------


def filled(pool: SlotPool) -> SlotPool:
    for buffer in pool.memory.buffers:
        buffer.fill_(1)
    return pool


def written_tokens(pool: SlotPool, pages: LocalPages) -> list[set[int]]:
    """For each segment, and both regions of an index segment: the positions that hold anything."""
    found = []
    for segment in pool.fmt.segments:
        views = (
            [pool.main_view(segment.layer)]
            if segment.group is Group.MAIN
            else [pool.index_keys(segment.layer), pool.index_scales(segment.layer)]
        )
        for view in views:
            rows = view.numpy()[pages.array].any(axis=-1).reshape(-1)
            found.append(set(np.flatnonzero(rows).tolist()))
    return found


@pytest.mark.parametrize("placement", ["page_major", "layer_major"])
@pytest.mark.parametrize(("length", "written"), [(10, 13), (62, 66), (64, 67), (63, 64), (5, 5), (130, 200)])
def test_a_roll_back_leaves_nothing_past_the_length_in_either_cache(placement: Any, length: int, written: int) -> None:
    pool = filled(SlotPool.create(tiny_format(draft_layers=1), 6, placement=placement))
    pages = all_pages(pool)
    roll_back(pool, pages, length, written)
    cleared = set(range(length, -(-written // PAGE) * PAGE)) if written > length else set()
    every = set(range(len(pages) * PAGE))
    assert all(rows == every - cleared for rows in written_tokens(pool, pages))
    assert len(written_tokens(pool, pages)) == 9 + 2 * 5


@pytest.mark.parametrize("facts", [ORACLE, MTP, SHARED], ids=["oracle", "mtp", "shared index"])
def test_after_each_step_the_accepted_tokens_are_all_that_is_there(facts: dict[str, Any]) -> None:
    pair = make_pair(both=facts)
    pair.close()
    contract = pair.decode.parts.contract
    pool = SlotPool.create(pair.decode.parts.pool.fmt, 6)
    engine, pages = ToyEngine(pool), all_pages(pool)
    drafter = toy_drafter(engine, contract, acceptance=0.6)
    assert drafter is not None
    prompt = np.arange(60, dtype=np.uint32)
    computed = engine.chunk(prompt, 0, pages)
    draft = drafter.extend(computed.hidden, np.append(prompt[1:], np.uint32(99)), 0, pages)
    answer = Answer(Token(0, 99, 0.0), 60, Sampling(max_tokens=50), pages=pages, want_logits=False)
    decoder = Decoder(engine, drafter, pool, 3, draft)
    while not answer.over:
        before = answer.place
        said = decoder.step(answer)
        assert 1 <= len(said) <= 4
        assert answer.place == before + len(said)
        rows = written_tokens(pool, pages)
        assert all(r == set(range(answer.place)) for r in rows), (answer.place, rows)
    count = decoder.report(answer.made)
    assert count is not None
    assert count.rolled_back_tokens > 0


def test_a_dirty_tail_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr("pdkv.node.speculation.roll_back", lambda *_: None)
    with pytest.raises(AssertionError):
        test_after_each_step_the_accepted_tokens_are_all_that_is_there(ORACLE)


def test_no_step_reaches_past_what_plain_decoding_reaches() -> None:
    pool = random_pool(tiny_format(), 3)
    engine, pages = ToyEngine(pool), all_pages(pool)

    class Counting:
        hidden_width = 0
        asked: list[int] = []  # noqa: RUF012

        def extend(self, hidden: np.ndarray, after: UInt32Array, start: int, pages: LocalPages) -> None: ...

        def propose(self, ask: DraftAsk, pages: LocalPages) -> Drafts:
            self.asked.append(ask.count)
            return Drafts(np.zeros(ask.count, np.uint32))

    answer = Answer(Token(0, 1, 0.0), 0, Sampling(max_tokens=6), pages=pages, want_logits=False)
    decoder = Decoder(engine, Counting(), pool, 3, None)
    while not answer.over:
        decoder.step(answer)
    assert Counting.asked == [3, 3, 2, 1]
    assert max(stop for _, stop in engine.steps) == 5  # the last token's own rows are never needed


# --- the hand-off -----------------------------------------------------------------------------------------------------


LOST = ["drop-hidden", "drop-draft-tokens", "drop-seed"]


@pytest.mark.parametrize("fault", LOST)
def test_a_lost_part_of_the_hand_off_is_refused_by_name(fault: str) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(AccountMismatch, match="draft_digest"):
            await answers(pair.decode.generate(asking(150, Sampling(max_tokens=9), fault=fault)))
        await recovered(pair)

    run(scenario, make_pair(both=SHARED))


@pytest.mark.parametrize("fault", LOST)
def test_without_the_check_it_changes_drafts_and_no_token(fault: str) -> None:
    """So only draft logits, or their acceptance, could tell: the reason for the digest."""

    async def scenario(pair: Pair) -> None:
        asked = asking(150, Sampling(max_tokens=9), fault=fault)
        tokens, _ = await heard(pair, asked)
        (one,) = in_one_process(pair, asked)
        assert tuple(t.token for t in tokens) == one.tokens
        assert tuple(t.logits_digest for t in tokens) == one.logits_digests
        assert tokens[1].draft_digests[1:] != one.draft_digests[1][1:]
        await rested(pair)

    run(scenario, make_pair(both=SHARED, digest="none"))


def test_lost_draft_rows_are_caught_by_the_digests_of_both_caches() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(DigestMismatch, match="both"):
            await answers(pair.decode.generate(asking(150, Sampling(max_tokens=9), fault="drop-draft-rows")))
        await recovered(pair)

    run(scenario, make_pair(both=MTP))


def test_without_digests_lost_draft_rows_change_drafts_and_no_token() -> None:
    async def scenario(pair: Pair) -> None:
        asked = asking(150, Sampling(max_tokens=9), fault="drop-draft-rows")
        tokens, _ = await heard(pair, asked)
        (one,) = in_one_process(pair, asked)
        assert tuple(t.token for t in tokens) == one.tokens
        assert [t.draft_digests for t in tokens] != list(one.draft_digests)

    run(scenario, make_pair(both=MTP, digest="none"))


# --- what both nodes must agree on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"draft_tokens": 2}, "draft_tokens"),
        ({"rollback_tokens": 2}, "rollback_tokens"),
        ({"index_sharing": False}, "index_sharing"),
        ({"speculation": "oracle", "eagle_rule": "none", "index_sharing": False}, "speculation"),
    ],
)
def test_unequal_speculation_is_refused_by_name(other: dict[str, Any], field: str) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ContractMismatch, match=field):
            await answers(pair.decode.generate(request(100)))

    run(scenario, make_pair(both=SHARED, **other))


def test_the_effective_sharing_is_shown() -> None:
    pair = make_pair(both=SHARED)
    pair.close()
    assert pair.decode.status().contract.index_sharing
    assert pair.decode.status().contract.rollback_tokens == 3


# --- the canary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "made", "flagged"),
    [
        (Speculation(100, 300, 39), 128, "mean accepted length 1.39 after 128 tokens, below 1.4"),
        (Speculation(1000, 3000, 399), 1500, "mean accepted length 1.39 after 1500"),
        (Speculation(100, 300, 39), 127, ""),
        (Speculation(100, 300, 40), 200, ""),
        (Speculation(100, 300, 288), 400, ""),
        (Speculation(100, 300, 289), 400, "289 of 300 drafts accepted, a rate above 0.96"),
        (Speculation(8, 24, 24), 32, ""),
        (Speculation(9, 25, 25), 34, "25 of 25"),
        (Speculation(), 500, ""),
    ],
)
def test_the_canary_names_the_two_suspicious_ranges(count: Speculation, made: int, flagged: str) -> None:
    assert canary(count, made).startswith(flagged) == bool(flagged or not canary(count, made))


def test_a_request_with_hardly_any_acceptance_says_so() -> None:
    async def scenario(pair: Pair) -> None:
        _, done = await heard(pair, asking(100, Sampling(max_tokens=140)))
        assert done.speculation is not None
        assert "below 1.4" in done.speculation.canary

    run(scenario, make_pair(both=MTP))
