"""Nodes that were built for cases of one setup, and one repetition of a case on them.

Guarantees: nothing runs while a pull is timed but that pull; after it, and outside of its time, digests of the pulled
pages are computed on both sides and compared, whether or not the nodes had done so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdkv.cli.bench.cases import Case, Mode, Setup
from pdkv.cli.bench.pulls import Opened, SinkNode, Wish
from pdkv.cli.bench.rows import Sample
from pdkv.cli.bench.workers import SinkProcess
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, page_format
from pdkv.rpc.bench import BenchPrompt, GrpcBench, Preparation, SourceNode

SEED = 1
"""Of the first source's prompt; the others' follow."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the nodes of all cases have in common."""

    model: str
    ucx_tls: str = ""
    net_devices: str = ""
    sink_id: str = "sink"
    damaged_pages: int = 0
    """Of each pull, changed after they were proved: to show that it is found."""

    @property
    def fmt(self) -> PageFormat:
        return page_format(model_shape(load_config(self.model)))


class Pair:
    """Sources and sinks of one setup: `build` them, `repeat` cases, `close`."""

    def __init__(self, nodes: Nodes, setup: Setup, sources: dict[str, GrpcBench], sinks: Sequence[SinkProcess]) -> None:
        """The first ones of `sources` (by address) and `sinks` are used."""
        self.setup = setup
        self._nodes = nodes
        self._fmt = nodes.fmt
        self._sources = dict(list(sources.items())[: setup.sources])
        self._sinks = sinks[: setup.sinks]
        self._sink_pages = 0
        self._prepared: dict[str, Preparation] = {}
        self._opened: list[Opened] = []
        self._source_huge = 0.0

    @property
    def lane(self) -> str:
        """Of all connections, once there are some."""
        return "+".join(sorted({lane for opened in self._opened for lane in opened.lanes}))

    async def build(self, cases: Sequence[Case]) -> None:
        """For any of these. Raises what building and connecting raise."""
        setup = self.setup
        pages, tokens = max(case.source_pages for case in cases), setup.chunk_pages * self._fmt.page_tokens
        node = SourceNode(self._nodes.model, pages, setup.source, tokens)
        self._source_huge = min(await asyncio.gather(*(bench.build(node) for bench in self._sources.values())))
        self._sink_pages = max(case.sink_pages for case in cases)
        self._prepared.clear()
        if not setup.cold:
            await self._connected(touched=True)

    async def repeat(self, case: Case) -> Sample:
        """Raises what a request raises."""
        prompts: list[tuple[str, BenchPrompt]] = []
        for i, address in enumerate(self._sources):
            first = BenchPrompt(SEED + i * case.series, case.pages)
            await self._prepare(address, first, case)
            prompts += [(address, BenchPrompt(first.seed + k, case.pages)) for k in range(case.series)]
        connect_s = await self._connected(touched=False) if self.setup.cold else []
        wish = Wish(
            tuple(prompts),
            case.hit_pages,
            case.scattered,
            case.digests,
            in_turn=case.series > 1,
            zeroed=not self.setup.cold,
            damaged_pages=self._nodes.damaged_pages,
        )
        await asyncio.gather(*(sink.ready(wish) for sink in self._sinks))
        before_s = await self.source_cpu_s()
        pulled = await asyncio.gather(*(sink.pull(wish) for sink in self._sinks))
        used_s = await self.source_cpu_s() - before_s
        return Sample(pulled, used_s, await self._wrong(prompts), connect_s, case.series > 1)

    async def huge_shares(self) -> tuple[float, float]:
        """How much of the pools is on huge pages now, 0 to 1: the worst source and the worst sink."""
        return self._source_huge, min([await sink.huge_share() for sink in self._sinks])

    async def source_cpu_s(self) -> float:
        """Of all sources, since their start."""
        return sum([(await bench.usage()).cpu_s for bench in self._sources.values()])

    async def sink_cpu_s(self) -> float:
        return sum([await sink.cpu_s() for sink in self._sinks])

    async def close(self) -> None:
        for sink in self._sinks:
            await sink.close()

    async def _prepare(self, address: str, prompt: BenchPrompt, case: Case) -> None:
        """A prompt that is cached is found again by the next pull: only what changes is made anew.

        A cached one is always sealed with its digests: whether they are checked is the sink's to say.
        """
        cached = case.mode is not Mode.STREAMING
        wanted = Preparation(prompt, cached, case.scattered, cached or case.digests, case.series)
        if not cached or self._prepared.get(address) != wanted:
            await self._sources[address].prepare(wanted)
            self._prepared[address] = wanted

    async def _connected(self, *, touched: bool) -> list[float]:
        """New sinks; seconds that each connection took."""
        nodes, setup = self._nodes, self.setup
        names = [nodes.sink_id] if setup.sinks == 1 else [f"{nodes.sink_id}-{i}" for i in range(setup.sinks)]
        node = SinkNode(
            nodes.model,
            self._sink_pages,
            setup.sink,
            setup.read_pages,
            touched,
            ucx_tls=nodes.ucx_tls,
            net_devices=nodes.net_devices,
        )
        addresses = tuple(self._sources)
        self._opened = await asyncio.gather(
            *(sink.open(replace(node, node_id=name), addresses) for sink, name in zip(self._sinks, names, strict=True))
        )
        return [seconds for opened in self._opened for seconds in opened.connect_s]

    async def _wrong(self, prompts: Sequence[tuple[str, BenchPrompt]]) -> int:
        """Caches of pages that differ between a source and a sink."""
        wrong = 0
        for address, prompt in prompts:
            due, *have = await asyncio.gather(
                self._sources[address].digests(prompt), *(sink.digests(prompt) for sink in self._sinks)
            )
            wrong += sum(int((found != due).sum()) for found in have)
        return wrong
