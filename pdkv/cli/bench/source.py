"""The side that pages are read from: a prefill node behind one address, which can be exchanged for another one.

Guarantees: what a sink meets is `node.prefill.PrefillNode` over the gRPC server and the transfer engine that serve; of
the engine alone a step is left out: pages hold their bytes from the beginning, and to compute them takes no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np

from pdkv.adapters.synthetic.engine import SyntheticEngine
from pdkv.cli.assemble import build_parts
from pdkv.cli.bench.ground import OrderedAllocator, forget, huge_share, ordered, prompt_tokens, switch_digests, usage
from pdkv.cli.bench.pulls import SourceSettings
from pdkv.config import PrefillConfig
from pdkv.errors import ConfigError, IntegrityError, PeerLost
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import LocalPages, UInt32Array, UInt64Array
from pdkv.kvcache.page_digest import digest_pages
from pdkv.node.base import NodeParts
from pdkv.node.computing import Computation
from pdkv.node.flow import begin, deadline
from pdkv.node.messages import (
    LeaseCall,
    Namespace,
    NodeIntro,
    NodeStatus,
    PrefillEvent,
    PrefillRequest,
    Sampling,
)
from pdkv.node.ports import Computed, Logits
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.rpc.bench import BenchPrompt, Preparation, SourceNode, Usage

DRAIN_S = 10.0
"""Longest that a node which is exchanged waits for its leases to be released."""
FILL_PAGES = 64
"""Pages that are filled in one step."""


class ResidentEngine:
    """`node.ports.Engine` whose pages are there before they are computed."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = np.zeros(vocab_size, np.float32)
        self._logits[1] = 1.0

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        return self._logits

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        return Computed(self._logits[None], np.zeros((len(tokens), 0), np.float32))

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        return Computed(np.tile(self._logits, (len(tokens), 1)), np.zeros((len(tokens), 0), np.float32))


class Source:
    """`rpc.bench.BenchService`, and `rpc.server.PrefillService` of the node that it is told to be."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._built: _Built | None = None
        self._exchange = asyncio.Lock()

    # --- as a benchmark's ---------------------------------------------------------------------------------------------

    async def build(self, node: SourceNode) -> float:
        """How much of its pool is on huge pages, 0 to 1.

        Raises `ConfigError` for what can't be built, or takes more memory than the operator allows.
        """
        page_bytes = page_format(model_shape(load_config(node.model))).page_bytes
        if node.pool_pages * page_bytes > self._settings.memory_bytes:
            most = self._settings.memory_bytes // page_bytes
            raise ConfigError("pool_pages", node.pool_pages, f"at most {most} pages of {page_bytes} B: memory")
        async with self._exchange:
            await self._end()
            self._built = _Built(await asyncio.to_thread(self._made, node), node)
            return await asyncio.to_thread(huge_share, self._built.parts.pool)

    async def prepare(self, preparation: Preparation) -> None:
        """Raises `CapacityError` if pages are in use, or the prompt is longer than the pool."""
        async with self._exchange:
            await self._there.prepare(preparation)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        """uint64 [pages, 2], of the bytes as they are now. Raises `IntegrityError` unless all pages are cached."""
        return await self._there.digests(prompt)

    def usage(self) -> Usage:
        return usage()

    async def close(self) -> None:
        async with self._exchange:
            await self._end()

    # --- as a prefill node's ------------------------------------------------------------------------------------------

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        return await self._there.node.connect(intro)

    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        return self._there.node.prefill(request)

    async def renew_lease(self, call: LeaseCall) -> float:
        return await self._there.node.renew_lease(call)

    async def release_lease(self, call: LeaseCall) -> None:
        await self._there.node.release_lease(call)

    def status(self) -> NodeStatus:
        return self._there.node.status()

    def estimate(self, call: EstimateCall) -> Estimate:
        return self._there.node.estimate(call)

    @property
    def _there(self) -> _Built:
        if self._built is None:
            raise PeerLost("this source was not told yet what node to be")
        return self._built

    def _made(self, node: SourceNode) -> NodeParts:
        config = PrefillConfig(
            node_id=self._settings.node_id,
            model=node.model,
            engine="synthetic",
            pool_pages=node.pool_pages,
            placement=node.placement,
            chunk_tokens=node.chunk_tokens,
            ucx_tls=self._settings.ucx_tls,
            net_devices=self._settings.net_devices,
        )
        parts = build_parts(config)
        if isinstance(parts.engine, SyntheticEngine):
            _fill(parts, parts.engine)
        return replace(parts, engine=ResidentEngine(parts.contract.vocab_size))

    async def _end(self) -> None:
        built, self._built = self._built, None
        if built is not None:
            await built.end()


class _Built:
    """One node's life."""

    def __init__(self, parts: NodeParts, node: SourceNode) -> None:
        self.parts = parts
        self.node = PrefillNode(parts, PrefillSettings(node.chunk_tokens))
        self._allocator: OrderedAllocator = ordered(parts.manager)
        self._beside = [begin(self.node.watch_leases()), begin(self.node.keeper.run())]

    async def prepare(self, preparation: Preparation) -> None:
        parts = self.parts
        forget(parts.manager)
        self._allocator.scattered = preparation.scattered
        switch_digests(parts.verifier, on=preparation.digests)
        if preparation.cached:
            first = preparation.prompt
            for seed in range(first.seed, first.seed + preparation.count):
                await self._cache(BenchPrompt(seed, first.pages))

    async def _cache(self, wanted: BenchPrompt) -> None:
        parts, prompt = self.parts, self._planned(wanted)
        manager = parts.manager
        reservation = manager.reserve(prompt.hashes, prompt.pages, max_hit_pages=prompt.prefill_hit_pages)
        try:
            steps = self.node.workspace.steps(0, len(prompt.tokens), self.node.settings.chunk_tokens)
            computation = Computation(parts, steps, prompt, reservation, Sampling())
            await computation.run(lambda: None, lambda first, last: None)
        finally:
            manager.end(reservation)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        pages = LocalPages.kept(self.parts.manager.tree.match(self._planned(prompt).hashes).pages)
        if len(pages) != prompt.pages:
            raise IntegrityError("pages of the prompt in the source's cache", have=len(pages), due=prompt.pages)
        return await self.parts.digests.run(digest_pages, self.parts.pool, pages)

    async def end(self) -> None:
        """Once nobody has a lease any more."""
        async with deadline(DRAIN_S, "leases of the node before"):
            await self.node.drain()
        for task in self._beside:
            task.cancel()
        await asyncio.wait(self._beside)
        await asyncio.to_thread(self.parts.close)
        self.parts.pool.close()

    def _planned(self, prompt: BenchPrompt) -> Prompt:
        contract = self.parts.contract
        return plan_prompt(prompt_tokens(prompt, contract.page_tokens, contract.vocab_size), Namespace(), contract)


def _fill(parts: NodeParts, engine: SyntheticEngine) -> None:
    """Every page with bytes that no other page has."""
    size, last = parts.pool.fmt.page_tokens, parts.pool.num_pages - 1
    tokens = prompt_tokens(BenchPrompt(0, last), size, parts.contract.vocab_size)
    pages = LocalPages.checked(np.arange(1, last + 1), parts.pool.num_pages)
    for first in range(0, last, FILL_PAGES):
        start, stop = first * size, min(first + FILL_PAGES, last) * size
        engine.forward(tokens[start:stop], start, pages)
