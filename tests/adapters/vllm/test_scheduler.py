"""The scheduler's half, as vLLM calls it: what is loaded, what is held, what is said."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pdkv.adapters.vllm.orders import Adapter
from pdkv.adapters.vllm.scheduler import Engine, SchedulerSide, prompt_of

ENGINE = Engine("engine", "10.0.0.2", 5700, 1, 16)
TO = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.1", "remote_port": 5600}
FROM = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}


@dataclass
class Lora:
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass
class Request:
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    request_id: str = "r"
    cache_salt: str | None = None
    lora_request: Lora | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: object | None = None
    num_computed_tokens: int = 0


def request(tokens: int, **params: Any) -> Request:
    return Request(list(range(tokens)), dict(params) or None)


def test_all_that_the_cache_lacks_comes_from_elsewhere_once() -> None:
    side, asked = SchedulerSide(ENGINE), request(40, **TO)
    assert side.matched(asked, 16) == side.matched(asked, 16) == 24, "asking changes nothing"
    side.allocated(asked, [7, 8, 9, 5], 24)
    (load,) = side.orders().loads
    assert (load.blocks, load.first_page, load.host, load.port) == ((8, 9), 1, "10.0.0.1", 5600)
    side.allocated(asked, [7, 8, 9, 5], 24)
    assert side.orders().loads == [], "vLLM asks again once it has arrived"
    assert side.matched(asked, 0) == 0, "preempted later, it is computed here"


def test_a_full_hit_lets_the_other_engine_go() -> None:
    side, asked = SchedulerSide(ENGINE), request(32, **TO)
    assert side.matched(asked, 32) == 0
    side.allocated(asked, [7, 8], 0)
    assert side.orders().loads[0].blocks == ()


def test_a_request_that_ends_before_it_got_blocks_lets_the_other_engine_go() -> None:
    side, asked = SchedulerSide(ENGINE), request(32, **TO)
    assert side.finished(asked, [], completed=False) == (False, None)
    assert side.orders().loads[0].blocks == ()


def test_a_prompt_for_another_engine_is_held_and_told_in_nixl_connectors_words() -> None:
    side = SchedulerSide(ENGINE)
    keep, said = side.finished(request(40, **FROM), [3, 4, 5, 6], completed=True)
    assert keep
    (hold,) = side.orders().holds
    assert hold.blocks == (3, 4, 5), "of the prompt, not of what was generated after it"
    assert said is not None
    assert said["do_remote_prefill"] is True
    assert (said["remote_host"], said["remote_port"], said["remote_block_ids"]) == ("10.0.0.2", 5700, [[3, 4, 5]])
    other = SchedulerSide(ENGINE)
    assert other.matched(request(40, **said), 0) == 40, "and what was told is what is understood"


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False}])
def test_an_ordinary_request_is_nobodys(params: dict[str, Any]) -> None:
    side, asked = SchedulerSide(ENGINE), request(40, **params)
    assert side.matched(asked, 0) == 0
    side.allocated(asked, [1, 2, 3], 0)
    assert side.finished(asked, [1, 2, 3], completed=True) == (False, None)
    assert side.orders() == SchedulerSide(ENGINE).orders()


def test_an_aborted_prompt_is_not_held() -> None:
    side = SchedulerSide(ENGINE)
    assert side.finished(request(40, **FROM), [3, 4, 5], completed=False) == (False, None)
    assert side.finished(request(40, **FROM), [3, 4], completed=True) == (False, None), "nor a part of one"
    assert side.orders().holds == []


@pytest.mark.parametrize("wrong", [{"remote_port": 0}, {"remote_host": None}, {"tp_size": 2}])
def test_what_cant_be_loaded_is_computed_here_and_that_is_said_once(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    side, asked, another = SchedulerSide(ENGINE), request(40, **(TO | wrong)), request(40, **(TO | wrong))
    for _ in range(3):  # vLLM asks at every step for as long as the request waits
        assert side.matched(asked, 0) == 0
    side.allocated(asked, [7, 8, 9], 0)
    assert side.finished(asked, [7, 8, 9], completed=True) == (False, None)
    assert side.orders().loads == []
    assert caplog.text.count(next(iter(wrong))) == 1
    assert side.matched(another, 0) == 0
    assert caplog.text.count(next(iter(wrong))) == 2, "of each request"


def test_a_prompt_of_embeddings_is_computed_here() -> None:
    assert SchedulerSide(ENGINE).matched(Request(None, dict(TO), prompt_embeds=object()), 0) == 0


def test_tokens_that_stand_for_embeddings_name_nothing() -> None:
    """Two prompts of unequal embeddings have the same placeholders."""
    side, asked, computed = SchedulerSide(ENGINE), request(40, **TO), request(40, **FROM)
    asked.prompt_embeds = computed.prompt_embeds = object()
    assert side.matched(asked, 0) == 0
    side.allocated(asked, [1, 2, 3], 0)
    assert side.finished(computed, [3, 4, 5], completed=True) == (False, None)
    assert side.orders() == SchedulerSide(ENGINE).orders()


def test_salt_and_adapter_go_with_the_prompt() -> None:
    side = SchedulerSide(replace(ENGINE, lora_dtype="bfloat16"))
    asked = request(40, **FROM)
    asked.cache_salt, asked.lora_request = "s", Lora("/adapters/a")
    assert side.finished(asked, [3, 4, 5], completed=True)[0]
    prompt = side.orders().holds[0].prompt
    assert (prompt.cache_salt, prompt.adapter) == ("s", Adapter("/adapters/a", "2d bfloat16"))
    plain = prompt_of(request(40), None)
    assert (plain.cache_salt, plain.adapter) == ("", None)


@pytest.mark.parametrize("lora", [Lora("somebody/adapter"), Lora("/a", load_inplace=True)])
def test_an_adapter_that_names_nothing_is_computed_here_and_not_kept(
    lora: Lora, caplog: pytest.LogCaptureFixture
) -> None:
    side, asked, computed = SchedulerSide(ENGINE), request(40, **TO), request(40, **FROM)
    asked.lora_request = computed.lora_request = lora
    assert side.matched(asked, 0) == 0
    assert side.finished(computed, [3, 4, 5], completed=True) == (False, None)
    assert side.orders() == SchedulerSide(ENGINE).orders()
    assert caplog.text.count(repr(lora.lora_path)) == 2, "it is said of both, and once of each"


@pytest.mark.parametrize(
    ("tokens", "computed", "kept"), [(40, 40, True), (40, 47, True), (40, 48, False), (48, 64, True)]
)
def test_a_last_block_that_the_answer_has_filled_is_another_prompts_page(
    tokens: int, computed: int, kept: bool
) -> None:
    side, asked = SchedulerSide(ENGINE), request(tokens, **FROM)
    asked.num_computed_tokens = computed
    assert side.finished(asked, [3, 4, 5, 6], completed=True)[0] is kept
    assert len(side.orders().holds) == kept
