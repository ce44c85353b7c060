"""`pdkv generate` against decode services by script: what it asks, what it shows, how it fails."""

import asyncio
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdkv.cli.app import run
from pdkv.errors import CapacityError
from pdkv.node.messages import FailurePolicy, GenerateDone, GenerateRequest, Sampling, Shipment, Speculation, Token
from tests.rpc.fakes import FakeDecode, FakeRouter, Stream, serving

SHIPMENT = Shipment(prompt_tokens=5, pages_total=1, pages_shipped=1, bytes_main=10, bytes_index=2, digests_verified=1)
TOKENS = (ord("o"), ord("k"), 10, 7, 256)
EVENTS = [*(Token(i, token, -0.5) for i, token in enumerate(TOKENS)), GenerateDone("length", len(TOKENS), SHIPMENT)]


def exit_code(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(args)
    return ended.value.code


def generated(stream: Stream, *args: str, role: str = "decode") -> int | str | None:
    """The command in a thread of its own, the service in this one's loop; its exit code."""

    async def body() -> int | str | None:
        services: dict[str, Any] = (
            {"decode": FakeDecode(stream)} if role == "decode" else {"router": FakeRouter(stream)}
        )
        async with serving(**services) as (server, _), asyncio.timeout(30.0):
            return await asyncio.to_thread(exit_code, "generate", *args, "--insecure", f"--{role}", server.address)

    return asyncio.run(body())


def asked(*args: str) -> GenerateRequest:
    stream = Stream(*EVENTS)
    assert generated(stream, *args) == 0
    request: GenerateRequest = stream.request
    return request


@pytest.mark.parametrize("role", ["decode", "router"])
def test_text_is_shown_and_the_account_beside_it(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(Stream(*EVENTS), "hello", role=role) == 0
    out, err = capsys.readouterr()
    assert out == "ok\n<7><256>"
    assert "5 tokens (length); prompt 5 tokens in 1 pages: 0 hit, 1 shipped" in err


def test_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(Stream(*EVENTS), "hello", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tokens"] == list(TOKENS)
    assert made["finish_reason"] == "length"
    assert {name: made[name] for name in ("pages_total", "bytes_main", "digests_verified")} == {
        "pages_total": 1,
        "bytes_main": 10,
        "digests_verified": 1,
    }


def test_a_policy_for_failures_is_asked_for_and_what_it_took_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("hello").on_failure is None
    assert asked("hello", "--on-failure", "retry").on_failure is FailurePolicy.RETRY
    assert exit_code("generate", "hello", "--on-failure", "again", "--decode", "h:1", "--insecure") == 2
    assert "fail, retry, recompute" in capsys.readouterr().err
    mended = [*EVENTS[:-1], GenerateDone("length", len(TOKENS), SHIPMENT, retries=1, recomputed_tokens=64)]
    assert generated(Stream(*mended), "hello") == 0
    assert "a prefill node failed it: 1 more asked, 64 tokens computed by decode" in capsys.readouterr().err
    assert generated(Stream(*mended), "hello", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["retries"], made["recomputed_tokens"]) == (1, 64)


def test_what_became_of_drafts_is_said_where_there_were_some(capsys: pytest.CaptureFixture[str]) -> None:
    count = Speculation(10, 30, 5, 25, "mean accepted length 1.50")
    drafted = [*EVENTS[:-1], GenerateDone("length", len(TOKENS), SHIPMENT, (), count)]
    assert generated(Stream(*drafted), "hello", "--json") == 0
    assert json.loads(capsys.readouterr().out)["speculation"] == {**asdict(count), "mean_accepted_length": 1.5}
    assert generated(Stream(*drafted), "hello") == 0
    said = "5 of 30 drafts accepted in 10 steps, 25 tokens rolled back, 1.50 tokens a step; suspicious: mean accepted"
    assert said in capsys.readouterr().err
    assert generated(Stream(*EVENTS), "hello", "--json") == 0
    assert "speculation" not in json.loads(capsys.readouterr().out)


def test_the_prompt_is_text_or_a_file_of_text_or_of_ids(tmp_path: Path) -> None:
    text, ids = tmp_path / "prompt.txt", tmp_path / "prompt.json"
    text.write_text("pagé", "utf-8")
    ids.write_text("[0, 256, 7]", "utf-8")
    for prompt, tokens in (("pagé", "pagé".encode()), (f"@{text}", "pagé".encode()), (f"@{ids}", (0, 256, 7))):
        request = asked(prompt)
        assert np.array_equal(request.tokens, np.array(list(tokens), np.uint32)), prompt
    assert request.tokens.dtype == np.uint32


def test_sampling_is_greedy_unless_asked_for() -> None:
    assert asked("a").sampling == Sampling(max_tokens=16)
    request = asked("a", "--sample", "temperature=0.8,top_p=0.9,seed=7", "--max-tokens", "3")
    assert request.sampling == Sampling(max_tokens=3, temperature=0.8, top_p=0.9, seed=7)


def test_no_two_requests_have_one_name() -> None:
    assert asked("a").request_id != asked("a").request_id
    assert (asked("a").priority, asked("a", "--priority", "-3").priority) == (0, -3)


@pytest.mark.parametrize("begun", [False, True])
def test_a_refusal_is_one_line_and_never_success(begun: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(*EVENTS[: 2 if begun else 0], error=CapacityError("9 pages wanted, 3 free", wanted=9, free=3))
    assert generated(stream, "hello") == 2
    out, err = capsys.readouterr()
    assert out == ("ok" if begun else "")
    assert err.splitlines() == ["pdkv: CapacityError: 9 pages wanted, 3 free"]


def test_a_stream_that_just_ends_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(Stream(*EVENTS[:-1]), "hello", "--json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdkv: PeerLost: ")


def test_an_interrupt_ends_it_here_and_at_the_node() -> None:
    async def body() -> None:
        stream = Stream(*EVENTS[:1], hangs=True)
        async with serving(decode=FakeDecode(stream)) as (server, _), asyncio.timeout(30.0):
            command = ["-m", "pdkv.cli", "generate", "hello", "--insecure", "--decode", server.address]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readexactly(1) == b"o"
            process.send_signal(signal.SIGINT)
            assert await process.communicate() == (b"", b"pdkv: interrupted\n")
            assert process.returncode == 130
            await stream.ended.wait()
            assert stream.end == "CancelledError"

    asyncio.run(body())


def test_a_node_that_does_not_serve_yet_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with serving(decode=FakeDecode(Stream(*EVENTS))) as (server, _), asyncio.timeout(30.0):
            await server.set_serving(serving=False)
            command = ("generate", "hello", "--insecure", "--decode", server.address)
            assert await asyncio.to_thread(exit_code, *command, "--wait", "0.2") == 2
            waiting = asyncio.create_task(asyncio.to_thread(exit_code, *command, "--wait", "30"))
            await server.set_serving(serving=True)
            assert await waiting == 0

    asyncio.run(body())
    out, err = capsys.readouterr()
    assert out == "ok\n<7><256>"
    assert err.startswith("pdkv: DeadlineExceeded: ")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("generate", "hello", "--insecure", "--decode", "127.0.0.1:1") == 2
    assert capsys.readouterr().err.startswith("pdkv: PeerLost: Generate at 127.0.0.1:1: UNAVAILABLE")


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("a",), "--decode, --router"),
        (("a", "--decode", "a:1", "--router", "b:2"), "--decode, --router"),
        (("a", "--decode", "nowhere"), "address"),
        (("a", "--decode", "a:1", "--sample", "heat=1"), "sample"),
        (("a", "--decode", "a:1", "--sample", "seed=x"), "sample.seed"),
        (("@nowhere.txt", "--decode", "a:1"), "prompt"),
        (("@ids.json", "--decode", "a:1"), "prompt"),
        (("@list.json", "--decode", "a:1"), "prompt"),
        (("@negative.json", "--decode", "a:1"), "prompt"),
        (("@fraction.json", "--decode", "a:1"), "prompt"),
        (("@nested.json", "--decode", "a:1"), "prompt"),
        (("@number.json", "--decode", "a:1"), "prompt"),
        (("@truth.json", "--decode", "a:1"), "prompt"),
        (("@empty.json", "--decode", "a:1"), "prompt"),
        (("", "--decode", "a:1"), "prompt"),
    ],
)
def test_bad_input_is_named(
    args: tuple[str, ...],
    field: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"ids": "{", "list": '["a"]', "negative": "[-1]", "fraction": "[1.5]", "nested": "[[1]]", "number": "3"}
    for name, text in {**texts, "truth": "[true]", "empty": "[]"}.items():
        (tmp_path / f"{name}.json").write_text(text, "utf-8")
    assert exit_code("generate", *args, "--insecure") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"pdkv: ConfigError: {field}: ")


@pytest.mark.parametrize("count", ["0", "-1", "5000000", "few"])
def test_so_many_tokens_can_not_be_asked_for(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("generate", "a", "--decode", "a:1", "--max-tokens", count) == 2
    assert "--max-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "insecure: not given; allowed: plain text where that is said (--insecure), or tls_ca"),
        (("--insecure", "--tls-ca", "ca.pem"), "insecure: True can't be used; allowed: false where there is tls_ca"),
        (("--tls-ca", "ca.pem", "--tls-key", "k.pem"), "tls_certificate: '' can't be used; allowed: a PEM file: "),
    ],
)
def test_plain_text_or_tls_has_to_be_said(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate", "a", "--decode", "a:1", *flags) == 2
    assert capsys.readouterr().err.startswith(f"pdkv: ConfigError: {words}")


def test_what_is_said_for_all_commands_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDKV_INSECURE", "true")
    assert exit_code("generate", "hello", "--decode", "127.0.0.1:1") == 2
    assert capsys.readouterr().err.startswith("pdkv: PeerLost: ")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("generate", "--help") == 0
    assert "pdkv generate" in capsys.readouterr().out
