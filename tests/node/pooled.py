"""The toy model with a pooled index: an index row stands for a window of kpool tokens, once it is whole."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdkv.adapters.reference.monolith import Monolith
from pdkv.contract import ContractFacts, build_contract
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages, NodeId, PeerName, UInt32Array, new_incarnation
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import Worker
from pdkv.node.messages import GenerateRequest
from pdkv.node.ports import Logits
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.engine import TransferEngine
from tests.node.toy import VOCAB, OneByOne, Pair, ToyEngine, toy_drafter


class PooledToy(ToyEngine):
    """Keys of an open window are read from the page's pending ring: one that was lost changes an index row later on,
    and by that every token from there. An open window's keys count by themselves as well, as attention to its tokens.
    """

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        size = self.pool.fmt.page_tokens
        stop = start + len(tokens)
        self.steps.append((start, stop))
        positions = np.arange(start, stop)
        for segment in self.pool.fmt.segments:
            mark = ((tokens * 31 + positions * 7 + segment.layer * 3) % 255 + 1).astype(np.uint8)
            if segment.group is Group.MAIN:
                rows = self.pool.main_view(segment.layer).numpy()
                rows[pages.array[positions // size], positions % size] = mark[:, None]
            elif not segment.pending:
                self._write_keys(segment.layer, mark, start, pages)
        return self.change(self._logits(stop, pages))

    def _write_keys(self, layer: int, marks: np.ndarray, start: int, pages: LocalPages) -> None:
        """`marks`: the byte that each token's key is made of."""
        fmt = self.pool.fmt
        size, kpool, stop = fmt.page_tokens, fmt.kpool, start + len(marks)
        ring = self.pool.pending_keys(layer).numpy()
        first = start - start % kpool
        known = np.concatenate((self._open(ring, first, start, pages), marks)).astype(np.int64)
        whole = (stop - first) // kpool
        pooled = (known[: whole * kpool].reshape(whole, kpool) @ np.arange(1, kpool + 1)) % 251 + 1
        row = np.arange(whole) + first // kpool
        at = pages.array[row // fmt.index_tokens], row % fmt.index_tokens
        self.pool.index_keys(layer).numpy()[at] = pooled.astype(np.uint8)[:, None]
        self.pool.index_scales(layer).numpy()[at] = (pooled ^ 0x55).astype(np.uint8)[:, None]
        positions = np.arange(start, stop)
        page_ends = np.minimum(stop, (positions // size + 1) * size)
        last = positions + fmt.pending_rows >= page_ends  # each row of the ring once
        slots = positions[last] % size % fmt.pending_rows
        ring[pages.array[positions[last] // size], slots] = marks[last, None]

    def _open(self, ring: np.ndarray, first: int, stop: int, pages: LocalPages) -> np.ndarray:
        size = self.pool.fmt.page_tokens
        positions = np.arange(first, stop)
        found: np.ndarray = ring[pages.array[positions // size], positions % size % ring.shape[1], 0]
        return found

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        fmt = self.pool.fmt
        seen = 0
        for index in range(-(-stop // fmt.page_tokens)):
            page, tokens = int(pages.array[index]), min(stop - index * fmt.page_tokens, fmt.page_tokens)
            for segment in fmt.segments:
                if segment.group is Group.MAIN:
                    parts = [self.pool.main_view(segment.layer).numpy()[page, :tokens]]
                elif segment.pending:
                    ring = self.pool.pending_keys(segment.layer).numpy()
                    parts = [self._open(ring, stop - stop % fmt.kpool, stop, pages)]
                else:
                    keys, scales = self.pool.index_keys(segment.layer), self.pool.index_scales(segment.layer)
                    parts = [part.numpy()[page, : tokens // fmt.kpool] for part in (keys, scales)]
                for part in parts:
                    seen = zlib.crc32(np.ascontiguousarray(part), seen)
        return np.random.default_rng([seen, stop]).standard_normal(VOCAB).astype(np.float32)


@dataclass(frozen=True)
class Pooling:
    """Of both nodes of a pair."""

    kpool: int
    rollback: int = 0
    placement: str = "page_major"

    @property
    def page(self) -> int:
        return 64 * self.kpool


def pooled_parts(name: str, pooling: Pooling, net: LoopbackNet, digest: str, **facts: Any) -> NodeParts:
    shape = model_shape({**load_config("tiny"), "index_kpool": pooling.kpool}, draft_layers=0)
    fmt = page_format(shape, rollback_tokens=pooling.rollback)
    pool = SlotPool.create(fmt, 12, placement=pooling.placement)  # type: ignore[arg-type]
    identity = ContractFacts(weights_id="toy", placement=pooling.placement, **facts)
    contract = build_contract(shape, fmt, identity=identity)
    engine = PooledToy(pool)
    peer = PeerName(NodeId(name), new_incarnation())
    return NodeParts(
        name=peer,
        contract=contract,
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, digest),
        transfer=TransferEngine(net.backend, peer, pool.map()),
        engine=engine,
        steps=Worker("engine"),
        digests=Worker("digests"),
        drafter=toy_drafter(engine, contract),
    )


def pooled_pair(pooling: Pooling, *, digest: str = "xxh3_64", **facts: Any) -> Pair:
    net = LoopbackNet()
    prefill = PrefillNode(
        pooled_parts("p0", pooling, net, "xxh3_64", **facts), PrefillSettings(chunk_tokens=2 * pooling.page)
    )
    directory = OneByOne({"p0": prefill})
    settings = DecodeSettings(prefill_addresses=("p0",), allow_fault_injection=True)
    return Pair(
        prefill, DecodeNode(pooled_parts("d0", pooling, net, digest, **facts), directory, settings), net, directory
    )


def pooled_alone(pair: Pair, asked: GenerateRequest) -> tuple[int, ...]:
    """What one process answers, without drafts, with a pool of its own."""
    parts = pair.decode.parts
    pool = SlotPool.create(parts.pool.fmt, 12)
    process = Monolith(PooledToy(pool), pool, parts.contract, pair.prefill.settings.chunk_tokens)
    return process.generate(asked.tokens, asked.sampling).tokens
