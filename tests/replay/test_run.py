"""What a replay finds, against a set of page names; and proof that it notices a lost page."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError, IntegrityError
from pdkv.kvcache.eagle import EagleRule
from pdkv.kvcache.eviction import ORDERS
from pdkv.replay.run import MAX_PAGES, Replay, ReplaySettings, clock_cost_s, replay
from pdkv.replay.trace import TraceRequest, read_trace
from tests.replay.test_trace import SLICE

REQUESTS = read_trace(SLICE)
PLENTY = 80_000


def settings(**given: Any) -> ReplaySettings:
    return ReplaySettings(**{"pages": PLENTY, **given})


def found_without_limit(rule: EagleRule, page_tokens: int) -> tuple[list[int], int]:
    """Pages hit by each request, and different pages, by the golden file's names: (block, place in it)."""
    per_block, seen, hits = 512 // page_tokens, set(), []
    for request in REQUESTS:
        pages = (request.input_tokens - (rule is EagleRule.BIGRAM)) // page_tokens
        names = [(request.blocks[k // per_block], k % per_block) for k in range(pages)]
        hit = next((k for k, name in enumerate(names) if name not in seen), pages)
        hits.append(max(hit - (rule is EagleRule.DROP_PAGE), 0))
        seen.update(names)
    return hits, len(seen)


@pytest.mark.parametrize("page_tokens", [64, 512])
@pytest.mark.parametrize("rule", EagleRule)
def test_a_pool_that_holds_all_finds_all_there_is(rule: EagleRule, page_tokens: int) -> None:
    hits, distinct = found_without_limit(rule, page_tokens)
    result = replay(REQUESTS, settings(eagle_rule=rule, page_tokens=page_tokens))
    assert result.hit_pages == sum(hits)
    assert result.hits_by_length == Counter(1 << hit.bit_length() - 1 if hit else 0 for hit in hits)
    assert (result.requests, result.refused, result.evicted_pages) == (300, 0, 0)
    assert result.hit_rate == pytest.approx(sum(hits) / result.prompt_pages)
    assert result.census["cached"] == distinct


@pytest.mark.parametrize("policy", ORDERS)
def test_a_smaller_pool_finds_less_and_evicts(policy: str) -> None:
    rates = [replay(REQUESTS, settings(pages=pages, policy=policy)) for pages in (2_200, 30_000, PLENTY)]
    assert rates[0].hit_rate < rates[1].hit_rate < rates[2].hit_rate
    assert rates[0].evicted_pages > rates[1].evicted_pages > rates[2].evicted_pages == 0
    for result in rates:
        assert sum(result.census[s] for s in ("free", "cached")) == result.census["total"] == result.settings.pages
        assert sum(result.hits_by_length.values()) == result.requests - result.refused


def test_what_is_larger_than_the_pool_is_refused_and_counted() -> None:
    pages = 100
    result = replay(REQUESTS, settings(pages=pages))
    larger = [r for r in REQUESTS if -(-(r.input_tokens + r.output_tokens) // 64) > pages]
    assert result.refused == len(larger) > 0
    assert result.prompt_pages == sum(r.input_tokens // 64 for r in REQUESTS)


def test_important_requests_keep_their_pages() -> None:
    again = TraceRequest(0, 64, 0, (1,), priority=1)
    others = [TraceRequest(0, 64, 0, (block,)) for block in range(2, 12)]
    for policy, hit in (("lru", 0), ("priority", 1)):
        result = replay([again, *others, again], settings(pages=4, policy=policy))
        assert result.hit_pages == hit


def test_time_is_told_by_call() -> None:
    result = replay(REQUESTS, settings())
    assert set(result.us_by_call) == {"reserve", "commit", "end"}
    assert result.us_per_request == sum(result.us_by_call.values()) > 0


def test_the_clock_itself_costs_little() -> None:
    assert 0 <= clock_cost_s() < 1e-4


@pytest.mark.parametrize("count", [1, 64, 300])
def test_progress_is_told_to_the_last_request(count: int) -> None:
    told: list[int] = []
    replay(REQUESTS[:count], settings(), told.append)
    assert sum(told) == count


def test_everything_is_recounted_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    check = Replay.check
    monkeypatch.setattr(Replay, "check", lambda run: (at.append(run.result.requests), check(run))[1])
    assert replay(REQUESTS, settings()).recounts == len(at) == 4
    assert at == [75, 150, 225, 300]


def _step_and_check(run: Replay) -> None:
    run.step(REQUESTS[1])
    run.check()


@pytest.mark.parametrize("lost", ["held", "counted", "shared"])
def test_a_lost_page_ends_the_run(lost: str) -> None:
    run = Replay(settings())
    run.step(REQUESTS[0])
    run.check()
    match lost:
        case "held":
            run.manager.end = lambda reservation: None  # type: ignore[method-assign, assignment]
        case "counted":
            run.manager.ownership._counts[0] -= 1
        case "shared":
            run.manager.allocator._free[run.manager.tree.match(run._names.of(REQUESTS[0].blocks, 1)).pages] = True
    with pytest.raises(IntegrityError):
        _step_and_check(run)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"pages": 0}, "pages"),
        ({"pages": MAX_PAGES + 1}, "pages"),
        ({"policy": "mru"}, "eviction"),
        ({"page_tokens": 48}, "page_tokens"),
    ],
)
def test_settings_that_can_not_be_used(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Replay(replace(settings(), **wrong))
