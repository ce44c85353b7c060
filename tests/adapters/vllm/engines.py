"""Workers of engines that are only memory: layers of random bytes, blocks handed out by the test."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdkv.adapters.vllm.adapters import FILES
from pdkv.adapters.vllm.facts import Allocated, contract_of
from pdkv.adapters.vllm.memory import LayerCache, engine_pool, row_order
from pdkv.adapters.vllm.orders import Adapter, Hold, Load, Prompt, StepOrders
from pdkv.adapters.vllm.settings import Settings
from pdkv.adapters.vllm.worker import Identity, Results, WorkerSide
from pdkv.contract import Contract
from pdkv.ids import NodeId

BLOCKS, TOKENS, HEADS, WIDTH, LAYERS = 24, 16, 2, 8, 3


@dataclass
class Model:
    model: str = "hub/toy"
    revision: str | None = "r1"
    dtype: object = "torch.float32"
    quantization: object = None
    hf_config: Any = None

    def get_vocab_size(self) -> int:
        return 512

    def get_total_num_hidden_layers(self) -> int:
        return LAYERS


@dataclass
class Cache:
    block_size: int = TOKENS
    cache_dtype: object = "auto"


@dataclass
class Parallel:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_index: int = 0


@dataclass
class Speculative:
    method: str | None = "eagle"
    num_speculative_tokens: int | None = 3
    model: str | None = "hub/draft"


@dataclass
class Config:
    model_config: Model
    cache_config: Cache
    parallel_config: Parallel
    speculative_config: Speculative | None = None


def config(**model: Any) -> Config:
    return Config(Model(**model), Cache(), Parallel())


def layers(seed: int = 0, blocks: int = BLOCKS) -> list[LayerCache]:
    """[blocks, heads, tokens, width], float32, a tensor a layer."""
    made = torch.Generator().manual_seed(seed)
    return [
        LayerCache(f"model.layers.{i}.attn", torch.rand((blocks, HEADS, TOKENS, WIDTH), generator=made))
        for i in range(LAYERS)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Engine:
    caches: list[LayerCache]
    settings: Settings
    side: WorkerSide

    def bytes_of(self, block: int) -> bytes:
        return b"".join(cache.tensor[block].numpy().tobytes() for cache in self.caches)

    def hold(self, request_id: str, prompt: Prompt, *blocks: int) -> None:
        self.side.begin(StepOrders(holds=[Hold(request_id, prompt, blocks)]))

    def load(self, request_id: str, prompt: Prompt, source: Engine, *blocks: int, first: int = 0) -> None:
        where = Load(request_id, prompt, blocks, first, "127.0.0.1", source.settings.port)
        self.side.begin(StepOrders(loads=[where]))

    def until(self, enough: Callable[[Results], object]) -> Results:
        """What the engine's steps fetch, together, until it is enough; at most 20 s."""
        all_, ends_s = Results(), time.monotonic() + 20
        while not enough(all_):
            assert time.monotonic() < ends_s, all_
            some = self.side.results()
            all_.sent |= some.sent
            all_.received |= some.received
            all_.failed |= some.failed
            all_.bad_blocks |= some.bad_blocks
            os.sched_yield()
        return all_


@contextmanager
def pair(*, change: Callable[[Contract], Contract] = lambda c: c, **settings: Any) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine; `change` makes the decode engine's contract."""
    with ExitStack() as stack:
        made = []
        for number, name in enumerate(("p", "d")):
            own = replace(Settings(host="127.0.0.1", port=free_port(), backend="loopback", find_s=20.0), **settings)
            caches = layers(number)
            pool = engine_pool(caches, BLOCKS, TOKENS)
            have = Allocated(pool, row_order(caches, BLOCKS), ["CPU"], "0.32.0")
            contract = contract_of(config(), have, shadow=own.shadow)
            side = WorkerSide(own, Identity(NodeId(name), 0, change(contract) if name == "d" else contract), pool)
            stack.callback(side.close)
            made.append(Engine(caches, own, side))
        yield made[0], made[1]


def prompt(count: int, seed: int = 0, salt: str = "", adapter: Adapter | None = None) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(0, 512, count, np.uint64), salt, adapter)


def lora(directory: Path, weights: bytes = b"weights", config: str = "{}", file: str = FILES[1]) -> Adapter:
    directory.mkdir(exist_ok=True, parents=True)
    (directory / FILES[0]).write_text(config)
    (directory / file).write_bytes(weights)
    return Adapter(str(directory), "2d float32")
