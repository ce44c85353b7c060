"""vLLM servers as processes, and the two calls that a proxy makes to a pair of them.

Guarantees: no process outlives the `Engines` that started it; whoever waits for an engine hears when it has ended, with
the last lines of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 600.0
"""An engine takes some 28 s of CPU time to start, most of it imports; on a busy machine that is minutes."""
ANSWER_S = 120.0
BLOCKS = 200
Tokens = list[int]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Plan:
    """How to start one engine."""

    name: str
    model: Path
    connector: str = ""
    """"PdkvConnector", "NixlConnector", or none."""
    role: str = "kv_both"
    extra: dict[str, Any] = field(default_factory=dict)
    on_failure: str = "fail"
    arguments: Sequence[str] = ()
    block_tokens: int = 64
    dtype: str = "float32"
    side_port: int = 0
    """0: any free one."""
    extension: str = ""
    """A class whose methods `Engine.call` can call in the worker."""


@dataclass
class Answer:
    tokens: Tokens
    params: dict[str, Any]
    error: str
    seconds: float


class Engine:
    """One server."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.port = plan, free_port()
        self.log = folder / f"{plan.name}.log"
        self.side_port = plan.side_port or free_port()
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_SERVER_DEV_MODE": str(int(bool(plan.extension))),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _command(self) -> list[str]:
        plan = self.plan
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "m"]
        command += ["--dtype", plan.dtype, "--block-size", str(plan.block_tokens), "--max-model-len", "2048"]
        command += ["--enforce-eager", "--enable-prefix-caching", "--max-num-seqs", "8"]
        command += ["--num-gpu-blocks-override", str(BLOCKS), "--kv-cache-memory-bytes", str(128 << 20)]
        if plan.extension:
            command += ["--worker-extension-cls", plan.extension]
        if plan.connector:
            said: dict[str, Any] = {
                "kv_connector": plan.connector,
                "kv_role": plan.role,
                "kv_load_failure_policy": plan.on_failure,
                "kv_connector_extra_config": plan.extra,
            }
            if plan.connector == "PdkvConnector":
                said["kv_connector_module_path"] = "pdkv.adapters.vllm"
            command += ["--kv-transfer-config", json.dumps(said)]
        return [*command, *plan.arguments]

    def ready(self) -> bool:
        """Whether it answers. Raises `RuntimeError` once it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.plan.name} has ended:\n" + "\n".join(self.log.read_text().splitlines()[-30:]))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def ask(self, tokens: Tokens, count: int, params: dict[str, Any] | None = None, *, model: str = "m") -> Answer:
        """`model`: the base, or an adapter of it."""
        body = _body(tokens, count) | {"model": model}
        if params is not None:
            body["kv_transfer_params"] = params
        began_s = time.monotonic()
        try:
            with self._post("v1/completions", body) as reply:
                said = json.load(reply)
        except urllib.error.HTTPError as error:
            return Answer([], {}, f"HTTP {error.code}", time.monotonic() - began_s)
        except OSError as error:
            return Answer([], {}, f"{type(error).__name__}: {error}", time.monotonic() - began_s)
        tokens_ = said["choices"][0]["token_ids"]
        return Answer(tokens_, said.get("kv_transfer_params") or {}, "", time.monotonic() - began_s)

    def stream(self, tokens: Tokens, count: int) -> Iterator[float]:
        """When each token of an answer arrives, on the monotonic clock."""
        with self._post("v1/completions", _body(tokens, count) | {"stream": True}) as reply:
            for line in reply:
                if line.startswith(b'data: {"'):
                    yield time.monotonic()

    def call(self, method: str, *arguments: str) -> None:
        """Of its plan's extension."""
        self._post("collective_rpc", {"method": method, "args": arguments}).close()

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(vllm:[\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def counted(self) -> dict[str, float]:
        """The connector's own counts."""
        prefix, suffix = "vllm:pdkv_", "_total"
        return {
            name[len(prefix) : -len(suffix)]: value
            for name, value in self.metrics().items()
            if name.startswith(prefix) and name.endswith(suffix)
        }

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def signal(self, number: int) -> None:
        """To all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _body(tokens: Tokens, count: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "prompt": tokens, "max_tokens": count, "temperature": 0}
    return body | {"return_token_ids": True, "ignore_eos": True}


class Engines:
    """Those that run; all end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Engine] = []

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._running:
            engine.stop()

    def start(self, *plans: Plan) -> list[Engine]:
        """Together; returns when all answer. Raises `TimeoutError` after `START_S`."""
        started = [Engine(plan, self._folder) for plan in plans]
        self._running += started
        ends_s = time.monotonic() + START_S
        for engine in started:
            while not engine.ready():
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"{engine.plan.name} did not answer within {START_S:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    engine.process.wait(0.2)  # which `ready` tells
        return started

    def stop(self, *engines: Engine) -> None:
        for engine in engines:
            engine.stop()
            self._running.remove(engine)


FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends with a prompt to a prefill engine."""


def through(prefill: Engine, decode: Engine, tokens: Tokens, count: int, *, model: str = "m") -> Answer:
    """As a proxy does it: the prompt to one, and what comes back with the prompt to the other."""
    computed = prefill.ask(tokens, 1, FOR_ANOTHER, model=model)
    if computed.error:
        return computed
    return decode.ask(tokens, count, computed.params, model=model)
