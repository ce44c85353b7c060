"""The side that reads: a decode node that pulls prompts to order, and says what each pull took.

Guarantees: a pull is a request to `node.decode.DecodeNode`, from its place in the queue to its first token; every page
that it may write to was zeroed before, outside of what is timed, so that no byte counts that was there already.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from pdkv.cli.assemble import build_parts
from pdkv.cli.bench.ground import forget, huge_share, ordered, prompt_tokens, switch_digests, usage
from pdkv.cli.bench.pulls import Opened, Pulled, SinkNode, Wish
from pdkv.config import DecodeConfig
from pdkv.errors import IntegrityError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages, RequestId, UInt64Array
from pdkv.kvcache.page_digest import digest_pages
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import begin
from pdkv.node.messages import GenerateDone, GenerateRequest, Namespace, Sampling, Shipment
from pdkv.node.ports import Transfer
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.node.stages import Stage
from pdkv.rpc.bench import BenchPrompt
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import Security
from pdkv.transfer.descriptors import plan
from pdkv.transfer.engine import ReadOrder, ReadOutcome

PULL_S = 600.0
"""Longest that one pull may take."""


class MeteredTransfer:
    """`node.ports.Transfer` that remembers how its reads ended."""

    def __init__(self, inner: Transfer) -> None:
        self._inner = inner
        self.reads: list[tuple[ReadOrder, ReadOutcome]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, order: ReadOrder) -> Future[ReadOutcome]:
        future = self._inner.read(order)
        future.add_done_callback(partial(self._ended, order))
        return future

    def _ended(self, order: ReadOrder, done: Future[ReadOutcome]) -> None:
        if done.exception() is None:
            self.reads.append((order, done.result()))


@dataclass
class _Times:
    """When each request reached its stages, for the first and for the last time."""

    first: dict[tuple[RequestId, Stage], float] = field(default_factory=dict)
    last: dict[tuple[RequestId, Stage], float] = field(default_factory=dict)

    def __call__(self, stage: Stage, request: RequestId) -> None:
        now_s = time.monotonic()
        self.first.setdefault((request, stage), now_s)
        self.last[request, stage] = now_s

    def clear(self) -> None:
        self.first.clear()
        self.last.clear()

    def asked(self, request: RequestId) -> float:
        return self.first[request, Stage.ASKED]

    def committed(self, request: RequestId) -> float:
        """Admitted, if there was nothing to commit."""
        return self.last.get((request, Stage.COMMITTED), self.admitted(request))

    def admitted(self, request: RequestId) -> float:
        return self.last[request, Stage.ADMITTED]

    def stages_s(self, requests: Sequence[RequestId]) -> dict[str, float]:
        """Medians, from asked to the first time of each stage on the way to the first pages."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for request in requests:
            for stage in (Stage.ACCEPTED, Stage.READING, Stage.ARRIVED, Stage.PREFILLED, Stage.ADMITTED):
                if (request, stage) in self.first:
                    found[stage.name.lower()].append(self.first[request, stage] - self.asked(request))
        return {name: statistics.median(times) for name, times in found.items()}


class Sink:
    """One after another: `open`, then `ready` and `pull` any number of times, `close`."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._open: _Open | None = None

    async def open(self, node: SinkNode, addresses: Sequence[str]) -> Opened:
        """Build the node and connect it to sources. Raises what building and connecting raise."""
        await self.close()
        began_s = time.monotonic()
        opened = self._open = _Open(await asyncio.to_thread(_made, node), self._security, tuple(addresses))
        built_s = time.monotonic()
        connect_s = [await opened.connect(address) for address in addresses]
        fmt, transfer = opened.parts.pool.fmt, opened.parts.transfer
        lanes = [transfer.lane((await opened.node.links.of(address)).intro.name) for address in addresses]
        return Opened(tuple(connect_s), tuple(lanes), fmt.main_bytes, fmt.index_bytes, built_s - began_s)

    async def ready(self, wish: Wish) -> None:
        """Everything that comes before a pull and is not part of it."""
        await self._there.ready(wish)

    async def pull(self, wish: Wish) -> Pulled:
        """Raises what a request raises; `IntegrityError` if `ready` was not called for the same wish."""
        return await self._there.pull(wish)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        """uint64 [pages, 2] of a pulled prompt's bytes as they are now."""
        return await self._there.digests(prompt)

    async def huge_share(self) -> float:
        """How much of the pool is on huge pages now, 0 to 1."""
        return await asyncio.to_thread(huge_share, self._there.parts.pool)

    async def cpu_s(self) -> float:
        """Of this process, since its start."""
        return usage().cpu_s

    async def close(self) -> None:
        """Idempotent."""
        opened, self._open = self._open, None
        if opened is not None:
            await opened.close()

    @property
    def _there(self) -> _Open:
        if self._open is None:
            raise IntegrityError("a sink that is not open")
        return self._open


class _Open:
    """One node's life."""

    def __init__(self, parts: NodeParts, security: Security, addresses: tuple[str, ...]) -> None:
        self.times = _Times()
        self.meter = MeteredTransfer(parts.transfer)
        self.parts = replace(parts, transfer=cast(Transfer, self.meter), at=self.times)
        self._pieces = 0
        """Of a page, on both sides together."""
        self._allocator = ordered(parts.manager)
        self._directory = GrpcDirectory(security)
        # All of its pages may be of one source.
        settings = DecodeSettings(addresses, read_deadline_s=PULL_S, peer_pages_share=1.0)
        self.node = DecodeNode(self.parts, self._directory, settings)
        runs = (self.node.watch_leases, self.node.keeper.run, self.node.links.redial.run)
        self._beside = [begin(run()) for run in runs]
        self._zeroed = np.zeros(parts.pool.num_pages, np.bool_)
        self._plans: dict[BenchPrompt, Prompt] = {}

    async def connect(self, address: str) -> float:
        """Seconds that it took."""
        began_s = time.monotonic()
        intro = await self.node.connect(address)
        took_s = time.monotonic() - began_s
        self._pieces = len(plan(self.parts.pool.map(), intro.pool).pieces)
        return took_s

    async def ready(self, wish: Wish) -> None:
        manager = self.parts.manager
        forget(manager)
        for _, prompt in wish.prompts:
            self._planned(prompt)
        self._allocator.scattered = wish.scattered
        switch_digests(self.parts.verifier, on=wish.digests)
        if wish.hit_pages:
            begun = replace(wish, hit_pages=0, prompts=tuple((a, _begun(p, wish.hit_pages)) for a, p in wish.prompts))
            await self._pull(begun)
        free = manager.allocator.allocate(sum(p.pages + 1 - wish.hit_pages for _, p in wish.prompts))
        if wish.zeroed:
            await asyncio.to_thread(self.parts.pool.zero, free)
        manager.allocator.free(free)
        self._zeroed[:] = False
        self._zeroed[free.array] = True

    async def pull(self, wish: Wish) -> Pulled:
        before_s = usage().cpu_s
        pulled = await self._pull(wish)
        cpu_s = usage().cpu_s - before_s
        written = np.concatenate([order.local.array for order, _ in self.meter.reads])
        if not self._zeroed[written].all():
            raise IntegrityError("pages were pulled into memory that was not made ready", pages=written.size)
        self._zeroed[written] = False
        for page in written[: wish.damaged_pages].tolist():
            self.parts.pool.group_bytes(page, Group.INDEX)[0][0] ^= 1
        return replace(pulled, cpu_s=cpu_s)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        pages = LocalPages.kept(self.parts.manager.tree.match(self._planned(prompt).hashes).pages)
        if len(pages) != prompt.pages:
            raise IntegrityError("pages of the prompt in the sink's cache", have=len(pages), due=prompt.pages)
        return await self.parts.digests.run(digest_pages, self.parts.pool, pages)

    async def close(self) -> None:
        await self.node.drain()
        for task in self._beside:
            task.cancel()
        await asyncio.wait(self._beside)
        await self._directory.close()
        await asyncio.to_thread(self.parts.close)
        self.parts.pool.close()

    async def _pull(self, wish: Wish) -> Pulled:
        """Returns when all leases are released."""
        self.times.clear()
        self.meter.reads.clear()
        requests = [self._request(address, prompt) for address, prompt in wish.prompts]
        if wish.in_turn:
            done = [await self._answered(request) for request in requests]
        else:
            done = await asyncio.gather(*map(self._answered, requests))
        times, ids = self.times, [request.request_id for request in requests]
        began_s = min(map(times.asked, ids))
        each_s, whole_s = (tuple(end(i) - times.asked(i) for i in ids) for end in (times.committed, times.admitted))
        order = max((order for order, _ in self.meter.reads), key=len)
        shipments = [each.shipment for each in done]
        return Pulled(
            began_s=began_s,
            committed_s=began_s + sum(each_s) if wish.in_turn else max(map(times.committed, ids)),
            admitted_s=began_s + sum(whole_s) if wish.in_turn else max(map(times.admitted, ids)),
            each_s=each_s,
            stages_s=times.stages_s(ids),
            pages=sum(s.pages_shipped - 1 for s in shipments),
            hit_pages=sum(s.pages_hit for s in shipments),
            shipped=_sum(shipments),
            descriptors_before=self._pieces * sum(len(order) for order, _ in self.meter.reads),
            post_s=sum(outcome.post_s for _, outcome in self.meter.reads),
            cpu_s=0.0,
            local=order.local.array,
            remote=order.remote.array,
        )

    async def _answered(self, request: GenerateRequest) -> GenerateDone:
        """With its lease released, so that it has left nothing that goes on."""
        async with aclosing(self.node.generate(request)) as events:
            done = [event async for event in events if isinstance(event, GenerateDone)]
        if self.node.farewells:
            await asyncio.wait(set(self.node.farewells))
        return done[0]

    def _request(self, address: str, prompt: BenchPrompt) -> GenerateRequest:
        return GenerateRequest(
            self.node.next_request_id(),
            self._planned(prompt).tokens,
            Sampling(max_tokens=1),
            prefill_address=address,
            remaining_s=PULL_S,
        )

    def _planned(self, prompt: BenchPrompt) -> Prompt:
        if prompt not in self._plans:
            contract = self.parts.contract
            tokens = prompt_tokens(prompt, contract.page_tokens, contract.vocab_size)
            self._plans[prompt] = plan_prompt(tokens, Namespace(), contract)
        return self._plans[prompt]


def _made(node: SinkNode) -> NodeParts:
    config = DecodeConfig(
        node_id=node.node_id,
        model=node.model,
        engine="synthetic",
        pool_pages=node.pool_pages,
        placement=node.placement,
        touch_pool=node.touched,
        ucx_tls=node.ucx_tls,
        net_devices=node.net_devices,
    )
    if node.read_pages:
        page_bytes = page_format(model_shape(load_config(node.model))).page_bytes
        config = config.model_copy(update={"read_max_bytes": node.read_pages * page_bytes})
    return build_parts(config)


def _begun(prompt: BenchPrompt, pages: int) -> BenchPrompt:
    return BenchPrompt(prompt.seed, pages)


def _sum(shipments: Sequence[Shipment]) -> Shipment:
    first, *rest = shipments
    names = ("pages_shipped", "bytes_main", "bytes_index", "bytes_tail", "bytes_backend", "descriptors")
    sums = {name: sum(getattr(s, name) for s in shipments) for name in (*names, "digests_verified", "chunks")}
    return replace(first, **sums) if rest else first
