"""Bodies of requests: what they ask for, and which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import FieldRefused, PdkvError, UnknownModel
from pdkv.http.question import ALLOWED, CompletionBody, Question, columns_of, question_in
from pdkv.node.messages import GenerateRequest, Namespace, Sampling

MODELS = ("tiny", "pdkv")
LEAST = {"model": "tiny", "prompt": [1, 2, 3]}


def asked(**more: Any) -> Question:
    return question_in(json.dumps({**LEAST, **more}).encode(), MODELS)


def request_of(question: Question) -> GenerateRequest:
    assert isinstance(question.prompt, list)
    return question.request("r", columns_of(question.prompt), (7, 9), 5.0)


def refused(raw: bytes) -> PdkvError:
    with pytest.raises((FieldRefused, UnknownModel)) as error:
        question_in(raw, MODELS)
    return error.value


def test_the_least_there_is() -> None:
    request = request_of(asked())
    assert request.tokens.tolist() == [1, 2, 3]
    assert (request.namespace, request.remaining_s, request.request_id) == (Namespace(), 5.0, "r")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop_tokens) == (16, 1.0, 1.0, (7, 9))
    assert request_of(asked()).sampling.seed != sampling.seed  # each draws its own


def test_everything_there_is() -> None:
    question = asked(
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[9, 4],
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        cache_salt="s",
        n=1,
        best_of=1,
        echo=False,
        logprobs=None,
        suffix=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        return_token_ids=True,
    )
    request = request_of(question)
    assert request.sampling == Sampling(3, 0.0, 0.5, 2**64 - 1, (9, 4, 7))
    assert request.namespace == Namespace("u", "s")
    assert (question.stops, question.usage) == (("a", "b"), True)
    assert request_of(asked(ignore_eos=True)).sampling.stop_tokens == ()


PROMPTS = (("text", "text"), (["text"], "text"), ([5, 6], [5, 6]), ([[5, 6]], [5, 6]), ([2**32 - 1], [2**32 - 1]))


@pytest.mark.parametrize(("prompt", "due"), PROMPTS)
def test_prompts(prompt: Any, due: Any) -> None:
    question = asked(prompt=prompt)
    assert question.prompt == due
    assert question.without_prompt().prompt == ""


NUMBERS = ("max_tokens", "temperature", "top_p", "seed", "n", "best_of", "presence_penalty", "frequency_penalty")
SWITCHES = ("ignore_eos", "echo", "stream", "return_token_ids")
NO_PROMPTS = (None, [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**32], [1.5], [True], {}, 5)
WRONG: tuple[tuple[str, Any], ...] = (
    *(
        ("prompt", value)
        for value in (None, [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**32], [1.5], [True], {}, 5)
    ),
    *(("max_tokens", value) for value in (0, -1, 1.5, "5", 1 << 40, True)),
    *(("temperature", value) for value in (-0.1, 101, "hot")),
    *(("top_p", value) for value in (0, 1.1)),
    *(("seed", value) for value in (-1, 1 << 64)),
    *(("stop", value) for value in ("", ["a"] * 17, ["x" * 257], [5])),
    *(("stop_token_ids", value) for value in ([-1], [1] * 257)),
    *(("stream_options", value) for value in ({"include_usage": True}, {"include": 1}, 5)),
    *(("n", value) for value in (0, 2)),
    *((field, value) for field in NUMBERS for value in (True, False)),
    *((field, value) for field in SWITCHES for value in (0, 1, 0.0)),
    ("stream_options", {"include_usage": 1}),
    ("stop_token_ids", [True]),
    ("prompt", [[True]]),
    *(("user", value) for value in ("x" * 1025, "a\nb", 5)),
    ("best_of", 2),
    ("echo", True),
    ("logprobs", 0),
    ("suffix", "x"),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("logit_bias", {"5": 1}),
    ("stream", "yes"),
)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_is_wrong_is_named_with_what_is_allowed(field: str, value: Any) -> None:
    error = refused(json.dumps({**LEAST, field: value}).encode())
    assert (error.fields["field"], error.fields["allowed"]) == (field, ALLOWED[field])
    assert len(error.fields["have"]) <= 80


def test_a_name_that_is_not_known_is_not_ignored() -> None:
    error = refused(json.dumps({**LEAST, "max_token": 5}).encode())
    assert (error.fields["field"], error.fields["have"]) == ("max_token", "5")


def test_a_model_that_is_not_served() -> None:
    error = refused(json.dumps({**LEAST, "model": "gpt"}).encode())
    assert isinstance(error, UnknownModel)
    assert error.fields["allowed"] == "tiny, pdkv"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(FieldRefused, match="prompt"):
        question_in(b'{"model": "tiny", "prompt": ""}', MODELS).request("r", columns_of([]), (), 1.0)


def test_every_field_has_its_words() -> None:
    assert set(ALLOWED) == set(CompletionBody.model_fields)


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values) | st.dictionaries(st.sampled_from([*ALLOWED, "x"]), values)


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), nested)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_used_or_refused_by_name(raw: bytes) -> None:
    refused_by = ""
    try:
        question_in(raw, MODELS)
    except (FieldRefused, UnknownModel) as error:
        refused_by = error.fields["field"]
    assert refused_by or json.loads(raw)["model"] in MODELS
