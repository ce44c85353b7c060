"""Completions over HTTP, of real processes: by curl, and by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.metrics.ending import WORDS
from pdkv.node.messages import Sampling
from tests.e2e.world import World, at_rest
from tests.waiting import until

IDS = {"return_token_ids": True}
LONG = 3000
"""Tokens of an answer that would take far longer than a test."""


@pytest.fixture(scope="module")
def front(world: World) -> NodeProcess:
    """A router over the world's nodes."""
    return world.run(
        world.start_router(
            "r-http", world.prefill, world.decode, http_bind="127.0.0.1:0", http_tokenizer="bytes", log_format="json"
        )
    )


@asynccontextmanager
async def client_of(node: NodeProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{node.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def text(seed: int, length: int) -> str:
    return text_tokens(9000 + seed, length).astype("u1").tobytes().decode()


async def ids(client: AsyncOpenAI, prompt: Any, **more: Any) -> list[int]:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **more}
    said = await client.completions.create(model="pdkv", prompt=prompt, extra_body=IDS, **asked)
    extra: Any = said.choices[0].model_extra
    return list(extra["token_ids"])


async def everything_given_back(world: World, front: NodeProcess) -> None:
    await until(world.decode_status, at_rest, "decode at rest")
    await until(world.prefill_status, at_rest, "prefill at rest")
    router = world.nodes.router(front.address)
    await until(router.status, lambda status: status.requests == 0, "the router at rest")


def test_curl_gets_what_pdkv_generate_gets(world: World, front: NodeProcess) -> None:
    prompt = text(301, 150)

    async def body() -> None:
        asked = {"model": "pdkv", "prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True, **IDS}
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sSN", f"http://{front.http}/v1/completions", "-d", json.dumps(asked)),
            stdout=asyncio.subprocess.PIPE,
        )
        said = (await curl.communicate())[0].decode()
        assert said.endswith("data: [DONE]\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in said.split("\n\n")[:-2]]
        generate = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdkv.cli", "generate", prompt, "--router", front.address, "--max-tokens", "6"),
            *("--insecure", "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        tokens = json.loads((await generate.communicate())[0])["tokens"]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens
        assert events[-1]["choices"][0]["finish_reason"] == "length"

    world.run(body())


def test_openais_client_whole_and_streamed(world: World, front: NodeProcess) -> None:
    tokens = text_tokens(9302, 200)

    async def body() -> None:
        alone = await world.alone(tokens, Sampling(8))
        async with client_of(front) as client:
            assert [model.id async for model in client.models.list()] == ["pdkv"]
            asked: dict[str, Any] = {"model": "pdkv", "prompt": tokens.tolist(), "max_tokens": 8, "temperature": 0}
            whole = await client.completions.create(**asked, extra_body=IDS)
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (200, 8)
            assert whole.choices[0].finish_reason == "length"
            stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            parts = [part async for part in stream]
            assert "".join(choice.text for part in parts for choice in part.choices) == whole.choices[0].text
            usage = parts[-1].usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == 192  # its full pages
            assert tuple(await ids(client, tokens.tolist())) == alone.tokens
            sampled = await ids(client, [tokens.tolist()], temperature=0.8, top_p=0.95, seed=5)
        drawn = await world.alone(tokens, Sampling(8, temperature=0.8, top_p=0.95, seed=5))
        assert tuple(sampled) == drawn.tokens

    world.run(body())


def test_what_is_wrong_is_what_the_client_expects(world: World, front: NodeProcess) -> None:
    async def body() -> None:
        async with client_of(front) as client:
            wrong: tuple[tuple[dict[str, Any], type[openai.APIStatusError], str | None], ...] = (
                ({"prompt": "a", "n": 2}, openai.BadRequestError, "n"),
                ({"prompt": [4_000_000_000]}, openai.BadRequestError, None),
                ({"prompt": "a", "model": "gpt"}, openai.NotFoundError, "model"),
                ({"prompt": "a", "max_tokens": 1 << 20}, openai.APIStatusError, None),
            )
            for change, kind, field in wrong:
                with pytest.raises(kind) as error:
                    await client.completions.create(**{"model": "pdkv", **change})
                assert error.value.param == field
            assert error.value.status_code == 413
        await everything_given_back(world, front)

    world.run(body())


def test_sixteen_at_once(world: World, front: NodeProcess) -> None:
    prompts = [text_tokens(9310 + n, 70 + 10 * n) for n in range(16)]

    async def body() -> None:
        async with client_of(front) as client:
            answers = await asyncio.gather(*(ids(client, prompt.tolist(), max_tokens=4) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert tuple(answer) == (await world.alone(prompt, Sampling(4))).tokens

    world.run(body())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything_everywhere(world: World, front: NodeProcess, *, stream: bool) -> None:
    async def body() -> None:
        async with client_of(front) as client:
            asked: dict[str, Any] = {"model": "pdkv", "prompt": text(330, 300), "max_tokens": LONG}
            asking = asyncio.create_task(client.completions.create(**asked, stream=stream))
            if stream:
                events = await asking
                await anext(aiter(events))
                await events.close()
            else:
                running = await until(world.decode_status, lambda status: status.requests == 1, "it runs")
                assert running.requests == 1
                asking.cancel()
        await everything_given_back(world, front)

    world.run(body())


def test_a_stop_text_ends_a_long_answer_as_one_that_is_done(world: World, front: NodeProcess) -> None:
    """Its stop comes after a full page of the answer, which the next turn finds."""
    prompt = text(335, 60)

    async def body() -> None:
        async with client_of(front) as client:
            asked: dict[str, Any] = {"model": "pdkv", "prompt": prompt, "temperature": 0}
            whole = (await client.completions.create(**asked, max_tokens=100)).choices[0].text
            start = next(at for at in range(80, len(whole) - 3) if whole.find(whole[at : at + 3]) == at)
            said = await client.completions.create(
                **asked, max_tokens=LONG, stop=whole[start : start + 3], extra_body={"user": "another"}
            )
            assert (said.choices[0].text, said.choices[0].finish_reason) == (whole[:start], "stop")
            assert said.usage is not None
            assert said.usage.completion_tokens < LONG
            await everything_given_back(world, front)
        lines = [json.loads(line) for line in front.log.read_text("utf-8").splitlines()]
        (mine,) = (line for line in lines if line["message"] == WORDS and line["request"] == said.id)
        assert (mine["outcome"], mine["finish_reason"]) == ("done", "stop")
        assert mine["output_tokens"] == said.usage.completion_tokens

    world.run(body())


def test_a_router_that_is_told_to_end_says_its_answers_to_the_end(world: World) -> None:
    async def body() -> None:
        router = await world.start_router(
            "r-http-ends", world.prefill, world.decode, http_bind="127.0.0.1:0", http_tokenizer="bytes"
        )
        async with client_of(router) as client:
            events = await client.completions.create(model="pdkv", prompt=text(340, 100), max_tokens=24, stream=True)
            first = await anext(aiter(events))
            router._process.send_signal(signal.SIGTERM)
            parts = [first, *[part async for part in events]]
            assert parts[-1].choices[0].finish_reason == "length"
        assert await router.wait() == 0

    world.run(body())


def test_a_decode_node_answers_by_itself(world: World) -> None:
    async def body() -> None:
        node = await world.start(
            "decode",
            "d-http",
            prefill_addresses=world.prefill.address,
            http_bind="127.0.0.1:0",
            http_tokenizer="bytes",
        )
        tokens = text_tokens(9350, 90)
        async with client_of(node) as client:
            assert tuple(await ids(client, tokens.tolist())) == (await world.alone(tokens)).tokens
        await node.stop()

    world.run(body())


def test_the_log_has_one_line_a_request(world: World, front: NodeProcess) -> None:
    async def body() -> None:
        async with client_of(front) as client:
            said = await client.completions.create(model="pdkv", prompt=text(360, 200), max_tokens=2)
        lines = [json.loads(line) for line in front.log.read_text("utf-8").splitlines()]
        mine = [line for line in lines if line["message"] == WORDS and line["request"] == said.id]
        assert len(mine) == 1
        assert (mine[0]["node"], mine[0]["outcome"], mine[0]["prompt_tokens"]) == ("r-http", "done", 200)
        assert mine[0]["shipped_pages"] == mine[0]["digests_verified"] == 4

    world.run(body())
