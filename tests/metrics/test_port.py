"""Callers of the metrics port: many at once, and such that say nothing."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from contextlib import ExitStack
from functools import partial
from socketserver import ThreadingMixIn

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pdkv.metrics import port as port_module
from pdkv.metrics.port import AT_ONCE, serving
from tests.waiting import until


def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    Gauge("answer", "Of everything", registry=found).set(42)
    return found


def asked(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def answer_of(port: int) -> str:
    try:
        return asked(port)
    except OSError:
        return ""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_answers_and_the_port_is_free_again(host: str) -> None:
    with serving(registry(), host, 0) as port:
        assert "answer 42.0" in asked(port, f"[{host}]" if ":" in host else host)
    with serving(registry(), host, port) as again:
        assert again == port
        with pytest.raises(OSError, match="in use"), serving(registry(), host, port):
            pass


def test_callers_for_whom_there_was_no_thread_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with serving(registry(), "127.0.0.1", 0) as port:
        with monkeypatch.context() as short:
            short.setattr(ThreadingMixIn, "process_request", no_thread)
            assert [answer_of(port) for _ in range(AT_ONCE)] == [""] * AT_ONCE
        assert "answer 42.0" in asked(port)


def test_whoever_comes_beside_too_many_is_hung_up_on_and_the_silent_soon_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module._Handler, "timeout", 1.0)
    with serving(registry(), "127.0.0.1", 0) as port, ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(AT_ONCE)]
        with socket.create_connection(("127.0.0.1", port), 30) as beside:
            assert beside.recv(1) == b""
        assert [one.recv(1) for one in silent] == [b""] * AT_ONCE
        # a place is free again a moment after its caller was hung up on
        answered = asyncio.run(until(partial(asyncio.to_thread, answer_of, port), bool, "an answer"))
        assert "answer 42.0" in answered
