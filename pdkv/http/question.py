"""The body of a completion request: what it may say, and what is asked of the service then.

Guarantees: a body is used whole or refused with `FieldRefused`, which names the field, what it has and what it may
have; a field that isn't known, or that this service can't do, is never ignored. Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdkv.errors import FieldRefused, UnknownModel
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateRequest, Namespace, Sampling
from pdkv.rpc.convert.checks import MAX_TEXT, MAX_TOKENS
from pdkv.rpc.convert.common import MAX_STOP_TOKENS, MAX_TEMPERATURE

MAX_STOPS = 16
MAX_STOP = 256
_SHOWN = 80
_PRINTABLE = r"^[^\x00-\x1f\x7f]*$"

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Name = Annotated[str, Field(max_length=MAX_TEXT, pattern=_PRINTABLE)]
# Not Literal[1] and Literal[False]: to Python true is 1, and 0 is false.
One = Annotated[int, Field(ge=1, le=1)]
Never = Annotated[bool, Field(lt=True)]

ALLOWED = {
    "model": "the name of a served model",
    "prompt": "text, a list of token ids (0 to 4294967295), or a list with one of these; not empty",
    "max_tokens": f"a whole number, 1 to {MAX_TOKENS}",
    "temperature": f"a number, 0 to {MAX_TEMPERATURE:g}",
    "top_p": "a number above 0, at most 1",
    "seed": "a whole number, 0 to 18446744073709551615",
    "stop": f"text, or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP} characters",
    "stop_token_ids": f"a list of up to {MAX_STOP_TOKENS} token ids",
    "ignore_eos": "true or false",
    "stream": "true or false",
    "stream_options": "an object with include_usage, true or false, and only with stream",
    "return_token_ids": "true or false",
    "user": f"printable text of up to {MAX_TEXT} characters",
    "cache_salt": f"printable text of up to {MAX_TEXT} characters",
    "n": "1: one answer a request",
    "best_of": "1: one answer a request",
    "echo": "false: prompts are not repeated",
    "logprobs": "null: probabilities are not told",
    "suffix": "null: nothing is put in before a suffix",
    "presence_penalty": "0: there are no penalties",
    "frequency_penalty": "0: there are no penalties",
    "logit_bias": "null: there are no biases",
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False


class CompletionBody(BaseModel):
    """As OpenAI's clients write it; `stop_token_ids`, `ignore_eos`, `return_token_ids`, `cache_salt` as vLLM's do."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str
    prompt: Annotated[
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1)],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: Name | None = None
    cache_salt: Name | None = None
    n: One | None = None
    best_of: One | None = None
    echo: Never | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A body that can be used."""

    body: CompletionBody
    prompt: str | list[int]

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.body.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    @property
    def usage(self) -> bool:
        """A stream's last object tells the usage."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def without_prompt(self) -> Question:
        """What is left to know once it is under way: a long prompt's tokens take less as a column."""
        return Question(self.body.model_copy(update={"prompt": ""}), "")

    def request(self, number: str, tokens: UInt32Array, ends: Sequence[int], remaining_s: float) -> GenerateRequest:
        """What is asked of the service; `ends` are the tokenizer's own stop tokens. Raises `FieldRefused`."""
        body = self.body
        if not len(tokens):
            raise _refused("prompt", self.prompt)
        stop_tokens = (*(body.stop_token_ids or ()), *(() if body.ignore_eos else ends))
        sampling = Sampling(
            max_tokens=16 if body.max_tokens is None else body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(64) if body.seed is None else body.seed,
            stop_tokens=tuple(dict.fromkeys(stop_tokens)),
        )
        namespace = Namespace(body.user or "", body.cache_salt or "")
        return GenerateRequest(RequestId(number), tokens, sampling, namespace, remaining_s=remaining_s)


def question_in(raw: bytes, models: Sequence[str]) -> Question:
    """Raises `FieldRefused`, and `UnknownModel` for a name that isn't served."""
    try:
        body = CompletionBody.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise FieldRefused("body", "no such object", f"a JSON object ({first['msg']})") from error
        field = str(first["loc"][0])
        if first["type"] == "extra_forbidden" and field not in ALLOWED:
            raise FieldRefused(field[:_SHOWN], _short(first["input"]), "not to be there: it is not known") from error
        have = None if first["type"] == "missing" else first["input"]
        raise _refused(field, have) from error
    if body.model not in models:
        raise UnknownModel(body.model[:_SHOWN], models)
    if body.stream_options is not None and not body.stream:
        raise _refused("stream_options", body.stream_options.model_dump())
    return Question(body, _one(body.prompt))


def _one(prompt: Any) -> str | list[int]:
    """Of a list with one prompt, that one."""
    return prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) else prompt


def columns_of(ids: list[int]) -> UInt32Array:
    """Token ids, which are in range, as a column."""
    return np.array(ids, np.uint32)


def _refused(field: str, have: object) -> FieldRefused:
    return FieldRefused(field, _short(have), ALLOWED[field])


def _short(value: Any) -> str:
    """The beginning of it, as it would stand in Python; of a long list as little as of any other."""
    if isinstance(value, list | str):
        value = value[:_SHOWN]
    elif isinstance(value, dict):
        value = sorted(value)[:_SHOWN]
    return repr(value)[:_SHOWN]
