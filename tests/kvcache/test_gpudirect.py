"""What is asked of CUDA, by a runtime that answers as cards do; a real card is asked in tests/gpu."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pdkv.kvcache import gpudirect
from pdkv.kvcache.gpudirect import Flush, flush, flush_of

DEVICE = torch.device("cuda:1")
ORDERING, OPTIONS = 118, 117


class Runtime:
    """libcudart of a machine whose cards have these attributes."""

    def __init__(self, attributes: dict[int, int], error: int = 0) -> None:
        self.attributes = attributes
        self.error = error
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def cudaDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        assert device == 1
        if number not in self.attributes:
            return 1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[number]
        return 0

    def cudaSetDevice(self, device: int) -> int:
        self.calls.append(("set", (device,)))
        return 0

    def cudaDeviceFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.calls.append(("flush", (target, scope)))
        return self.error


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    flush_of.cache_clear()
    yield
    flush_of.cache_clear()


def with_runtime(monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int], error: int = 0) -> Runtime:
    runtime = Runtime(attributes, error)
    monkeypatch.setattr(gpudirect, "_runtime", lambda: runtime)
    return runtime


@pytest.mark.parametrize("ordering", [100, 200])
def test_a_platform_that_orders_writes_needs_no_flush(monkeypatch: pytest.MonkeyPatch, ordering: int) -> None:
    runtime = with_runtime(monkeypatch, {ORDERING: ordering, OPTIONS: 1})
    assert flush_of(DEVICE) is Flush.ORDERED
    flush(DEVICE)
    assert runtime.calls == []


def test_otherwise_the_driver_flushes_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = with_runtime(monkeypatch, {ORDERING: 0, OPTIONS: 1})
    assert flush_of(DEVICE) is Flush.CALLED
    flush(DEVICE)
    flush(DEVICE)
    assert runtime.calls == [("set", (1,)), ("flush", (0, 100))] * 2
    assert not caplog.records


def test_a_flush_that_failed_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_runtime(monkeypatch, {ORDERING: 0, OPTIONS: 1}, error=801)
    flush(DEVICE)
    assert "CUDA error 801" in caplog.text


@pytest.mark.parametrize("attributes", [{ORDERING: 0, OPTIONS: 2}, {ORDERING: 0}, {}])
def test_where_nothing_orders_them_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, attributes: dict[int, int]
) -> None:
    runtime = with_runtime(monkeypatch, attributes)
    for _ in range(3):
        flush(DEVICE)
    assert flush_of(DEVICE) is Flush.MISSING
    assert runtime.calls == []
    assert [(r.levelno, "digests may fail" in r.getMessage()) for r in caplog.records] == [(logging.WARNING, True)]


def test_a_torch_without_cuda_has_nothing_to_ask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    gpudirect._runtime.cache_clear()
    assert flush_of(DEVICE) is Flush.MISSING
    assert "without CUDA" in caplog.text
