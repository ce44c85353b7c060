"""The whole of a real hour of requests: the replay finds exactly what the trace allows, under each EAGLE rule."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from pdkv.kvcache.eagle import EagleRule
from pdkv.replay.run import ReplaySettings, replay
from pdkv.replay.trace import TraceRequest, read_trace

LEDGER: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))
GOLDEN = LEDGER["trace hits, conversation_trace.jsonl, infinite pool"]
PACKED = Path(__file__).with_name("conversation_trace.jsonl.xz")
RATES = {
    EagleRule.NONE: "hit_rate_no_rule",
    EagleRule.BIGRAM: "hit_rate_bigram",
    EagleRule.DROP_PAGE: "hit_rate_drop_page",
}
PLENTY = 1_500_000
"""More than all requests together have different pages."""


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[TraceRequest]:
    path = tmp_path_factory.mktemp("trace") / "conversation_trace.jsonl"
    path.write_bytes(lzma.decompress(PACKED.read_bytes()))
    return read_trace(path)


@pytest.mark.parametrize("rule", RATES)
def test_a_pool_that_holds_all_finds_what_the_trace_allows(rule: EagleRule, requests: list[TraceRequest]) -> None:
    assert GOLDEN["unit"].startswith("full 64-token pages of all requests")
    result = replay(requests, ReplaySettings(PLENTY, eagle_rule=rule))
    assert round(result.hit_rate, 6) == GOLDEN[RATES[rule]]
    assert (result.requests, result.refused, result.evicted_pages) == (12_031, 0, 0)
    if rule is EagleRule.NONE:
        assert (result.hit_pages, result.prompt_pages) == (GOLDEN["hits_no_rule"], GOLDEN["pages"])
