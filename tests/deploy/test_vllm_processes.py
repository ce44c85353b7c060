"""What the vllm overlay's pods run, run: the probe of an engine, its preflight, and vLLM's own router.

Engines are played: they answer as vLLM does, and write down what they were asked. The router is the real one, told of
them by a server that lists and watches pods as the API server does.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from pdkv.rpc.security import PlainText
from pdkv.rpc.server import Services
from tests.deploy.cluster import Object
from tests.deploy.test_overlays import built
from tests.deploy.vllm import SERVES
from tests.rpc.fakes import FakePrefill
from tests.rpc.tls import served

BIN = Path(sys.executable).parent
LIMIT_S = 60
ADDRESSES = {"prefill-a": "127.0.0.2", "prefill-b": "127.0.0.3", "decode-a": "127.0.0.4"}
HELD = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 5600, "remote_block_ids": [[1, 2]]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def container(role: str) -> Object:
    return built("vllm").workload(role).container


@dataclass
class Played:
    """An engine."""

    name: str
    healthy: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def completions(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        remote = (asked.get("kv_transfer_params") or {}).get("do_remote_decode")
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": "model", "usage": {}}
        answer["choices"] = [{"index": 0, "text": self.name, "finish_reason": "length"}]
        return web.json_response(answer | ({"kv_transfer_params": HELD} if remote else {}))


def changed(pod: Object) -> Object:
    """As watchers are told."""
    return {"type": "MODIFIED", "object": {"apiVersion": "v1", "kind": "Pod", **pod}}


@dataclass
class Pods:
    """What the API server knows, and says to those who watch."""

    known: dict[str, Object] = field(default_factory=dict)
    version: int = 1
    watches: list[asyncio.Queue[Object]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def say(self, name: str, role: str, *, ready: bool = True, ends: bool = False) -> None:
        self.version += 1
        metadata = {"name": name, "namespace": "pdkv", "uid": name, "resourceVersion": str(self.version)}
        metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if ends else {}
        labels = built("vllm").workload(role).labels
        status = {"phase": "Running", "podIP": ADDRESSES[name], "conditions": [{"type": "Ready", "status": str(ready)}]}
        self.known[name] = {"metadata": {**metadata, "labels": labels}, "spec": {"containers": []}, "status": status}
        for queue in self.watches:
            queue.put_nowait(changed(self.known[name]))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if "watch" not in request.query:
            listed = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.known.values())}
            return web.json_response({"apiVersion": "v1", "kind": "PodList", **listed})
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Object] = asyncio.Queue()
        for pod in self.known.values():
            if int(pod["metadata"]["resourceVersion"]) > int(request.query["resourceVersion"]):
                queue.put_nowait(changed(pod))
        self.watches.append(queue)
        while True:
            await response.write(json.dumps(await queue.get()).encode() + b"\n")


@asynccontextmanager
async def serving(host: str, port: int, **routes: Callable[[web.Request], Any]) -> AsyncIterator[int]:
    """An HTTP server; its port."""
    app = web.Application()
    for route, handler in routes.items():
        method, _, path = route.partition(" ")
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def engine(played: Played, host: str = "127.0.0.1", port: int = 0) -> Any:
    routes = {"GET /health": played.health, "POST /v1/completions": played.completions}
    return serving(host, port, **routes)


# --- an engine's pod --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("http", "side", "ready"), [(True, True, True), (False, True, False), (True, False, False)])
def test_an_engine_is_ready_only_while_both_vllm_and_its_side_channel_say_so(
    http: bool, side: bool, ready: bool
) -> None:
    command = container("decode")["readinessProbe"]["exec"]["command"]

    async def body() -> tuple[int, str]:
        played = Played("decode", healthy=http)
        async with engine(played) as port, served(PlainText(), Services(prefill=FakePrefill())) as server:
            await server.set_serving(serving=side)
            host, _, number = server.address.rpartition(":")
            told = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": number}
            words = [word.replace(":8000/", f":{port}/") for word in command]
            assert words != command
            environment = {"PATH": f"{BIN}:{os.environ['PATH']}", **told}
            pipe = asyncio.subprocess.PIPE
            probe = await asyncio.create_subprocess_exec(*words, env=environment, stdout=pipe, stderr=pipe)
            _, errors = await asyncio.wait_for(probe.communicate(), LIMIT_S)
            assert probe.returncode is not None
            return probe.returncode, errors.decode()

    code, errors = asyncio.run(body())
    assert (code == 0) is ready, errors
    assert ready or ("503" if not http else "NOT_SERVING") in errors


@pytest.mark.parametrize("asks", ["--require-rdma --device cuda:0 ", ""])
def test_an_engine_starts_only_where_the_doctor_finds_what_it_needs(asks: str, tmp_path: Path) -> None:
    """Asked for what no machine has, it loads no weights; asked for nothing, it becomes vLLM, with all arguments."""
    found = container("prefill")
    *shell, script, name = found["command"]
    assert script.endswith(SERVES)
    script = script.replace("--require-rdma --device cuda:0; ", f"{asks.replace('cuda:0', 'cuda:99')}; ")
    (tmp_path / "vllm").write_text('#!/bin/sh\nprintf "%s\\n" "$$" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*shell, script, name, *found["args"]], env=environment, **pipes) as process:  # type: ignore[call-overload]
        output, errors = process.communicate(timeout=LIMIT_S)
    served = [str(process.pid), "serve", *found["args"]]
    assert (process.returncode == 0) is (output.splitlines()[-len(served) :] == served) is not bool(asks), errors
    assert not asks or "not ready" in output


# --- vLLM's router ----------------------------------------------------------------------------------------------------


class Router:
    """The process, with the overlay's arguments but for addresses and ports."""

    def __init__(self, folder: Path, api_port: int, engine_port: int) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        named: list[Object] = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api_port}"}}]
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": named, "users": [{"name": "u", "user": {}}]}
        (folder / "config").write_text(
            yaml.safe_dump(config | {"contexts": [context], "current-context": "c"}), "utf-8"
        )
        self._environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(folder / "config")}
        others = {"port": port, "host": "127.0.0.1", "prometheus-port": free_port(), "prometheus-host": "127.0.0.1"}
        others |= {"service-discovery-port": engine_port, "service-discovery-namespace": "pdkv"}
        arguments = {f"--{name}": f"--{name}={value}" for name, value in others.items()}
        found = container("router")
        self._command = [str(BIN / found["command"][0])]
        self._command += [arguments.get(word.partition("=")[0], word) for word in found["args"]]

    async def __aenter__(self) -> Router:
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        self._process = await asyncio.create_subprocess_exec(*self._command, env=self._environment, **pipes)
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self._process.kill()
        await self._process.communicate()

    async def heard(self, *words: str) -> None:
        """Its log has had a line with each of them, in any order."""
        missing = set(words)
        assert self._process.stdout is not None
        while missing:
            line = (await self._process.stdout.readline()).decode()
            assert line, f"the router has ended, without a word of {missing}"
            missing -= {each for each in missing if each in line}

    async def until(self, status: int, prefill: int, decode: int) -> None:
        """Its readiness probe says so, with so many engines of either role; the test's deadline is the wait's."""
        path = container("router")["readinessProbe"]["httpGet"]["path"]
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with self._http.get(f"{self._url}{path}") as answer:
                    said = await answer.json()
                    if (answer.status, said["prefill"]["healthy"], said["decode"]["healthy"]) == (
                        status,
                        prefill,
                        decode,
                    ):
                        return
            await asyncio.sleep(0)

    async def complete(self, prompt: str) -> tuple[int, str]:
        asked = {"model": "model", "prompt": prompt, "max_tokens": 7}
        async with self._http.post(f"{self._url}/v1/completions", json=asked) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[Router, Pods, dict[str, Played]]]:
    """Engines at addresses of their own and at one port, and a router that has heard of none of them."""
    async with AsyncExitStack() as stack:
        pods, played, port = Pods(), {name: Played(name) for name in ADDRESSES}, 0
        for name, address in ADDRESSES.items():
            port = await stack.enter_async_context(engine(played[name], address, port))
        api_port = await stack.enter_async_context(serving("127.0.0.1", 0, **{"GET /{path:.*}": pods.answer}))
        router = await stack.enter_async_context(Router(folder, api_port, port))
        yield router, pods, played


def test_the_router_takes_ready_pods_only_and_hands_on_what_prefill_answers(tmp_path: Path) -> None:
    async def body() -> None:
        async with asyncio.timeout(LIMIT_S), fleet(tmp_path) as (router, pods, played):
            await router.heard("Starting server")
            await router.until(503, prefill=0, decode=0)
            pods.say("prefill-a", "prefill")
            pods.say("prefill-b", "prefill", ready=False)
            pods.say("decode-a", "decode")
            await router.heard("Added prefill server", "Added decode server")
            await router.until(200, prefill=1, decode=1)
            status, answer = await router.complete("once")
            assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "decode-a"), answer
            (first,), (second,) = played["prefill-a"].asked, played["decode-a"].asked
            assert (first["max_tokens"], second["max_tokens"]) == (1, 7)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert second["kv_transfer_params"] == HELD
            assert {method for method, _ in pods.asked} == {"GET"}
            assert {path for _, path in pods.asked} == {"/api/v1/namespaces/pdkv/pods"}

    asyncio.run(body())


def test_a_pod_that_ends_or_isnt_ready_any_more_is_asked_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with asyncio.timeout(LIMIT_S), fleet(tmp_path) as (router, pods, played):
            for name in ADDRESSES:
                pods.say(name, name.partition("-")[0])
            added = [f"Added {name.partition('-')[0]} server http://{address}" for name, address in ADDRESSES.items()]
            await router.heard(*added)
            await router.until(200, prefill=2, decode=1)
            pods.say("prefill-a", "prefill", ends=True)
            await router.heard("Removed prefill server")
            await router.until(200, prefill=1, decode=1)
            assert (await router.complete("once"))[0] == 200
            assert [len(played[name].asked) for name in ADDRESSES] == [0, 1, 1]
            pods.say("prefill-b", "prefill", ready=False)
            await router.heard("Removed prefill server")
            await router.until(503, prefill=0, decode=1)
            assert (await router.complete("once"))[0] == 503
            assert [len(played[name].asked) for name in ADDRESSES] == [0, 1, 1]

    asyncio.run(body())
