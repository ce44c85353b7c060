"""Numbers of a running node, for the complaints.

Guarantees: asks for the status once and changes nothing; prompts go out only when their length was given, and are
random, so that they hit nobody's pages.
"""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from pdkv.cli.status import status_of
from pdkv.contract import Contract
from pdkv.errors import ConfigError, ProtocolError
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.row_format import INDEX_FP8, main_row_format
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateDone, GenerateRequest, NodeStatus, Sampling, Shipment
from pdkv.node.ports import DecodeService

if TYPE_CHECKING:
    from pdkv.rpc.client import GrpcDirectory
    from pdkv.rpc.security import Security

STEPS = 16
"""Decode steps that are timed at each context."""
SHORT = 8
"""The short context is this many times shorter."""
LEAST_PROBE_TOKENS = 1024

Seen = dict[str, dict[str, int | float | str]]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a node said of itself, and what was measured with it."""

    contract: Contract
    seen: Seen
    """Complaint to numbers."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation: its account, and the median time between two of its tokens."""

    shipment: Shipment
    step_s: float


async def observe(address: str, probe_tokens: int | None, security: Security) -> Observed:
    """Raises `ConfigError` for an address or probe that can't be used, and what a call raises."""
    from pdkv.rpc.client import GrpcDirectory

    if probe_tokens is not None and probe_tokens < LEAST_PROBE_TOKENS:
        raise ConfigError("probe", probe_tokens, f"at least {LEAST_PROBE_TOKENS} tokens")
    directory = GrpcDirectory(security)
    try:
        status = await _status(directory, address)
        seen = of_status(status)
        if probe_tokens is not None:
            probed = await _probed(directory.decode(address), status, probe_tokens)
            seen |= {complaint: {**seen.get(complaint, {}), **numbers} for complaint, numbers in probed.items()}
        return Observed(status.contract, seen)
    finally:
        await directory.close()


def shape_of(contract: Contract) -> ModelShape:
    """The caches of a node. Raises `ConfigError` for a row format that is not known here."""
    row = main_row_format(contract.main_row_format)
    return ModelShape(
        architecture=contract.architecture,
        vocab_size=contract.vocab_size,
        num_layers=contract.num_layers,
        indexer_types=contract.indexer_types,
        draft_layers=contract.draft_layers,
        kv_lora_rank=row.part("latent").count,
        rope_dim=row.part("rope").count,
        index_head_dim=INDEX_FP8.key_bytes,
        index_topk=contract.index_topk,
        index_kpool=contract.index_kpool,
    )


def of_status(status: NodeStatus) -> Seen:
    """What a status says: of the pool, of what a long request finds there, and of what computes."""
    pages = status.pages
    page_bytes = sum(length for _, length in status.contract.segments)
    return {
        "pool": {
            "memory_bytes": (pages["total"] + 1) * page_bytes,
            "usable_pages": pages["total"],
            "page_bytes": page_bytes,
        },
        "refused": {
            "total_pages": pages["total"],
            "free_pages": pages["free"],
            "cached_pages": pages["cached"],
            "quarantined_pages": pages["quarantined"],
            **({"locked_pages": pages["locked"]} if "locked" in pages else {}),
        },
        "step": {"engine": status.contract.engine},
    }


async def _status(directory: GrpcDirectory, address: str) -> NodeStatus:
    found = await status_of(directory, address)
    if not isinstance(found, NodeStatus):
        raise ConfigError("node", address, "a decode or prefill node; this is a router, which has no pages")
    return found


async def _probed(service: DecodeService, status: NodeStatus, tokens: int) -> Seen:
    """A prompt without and then with a hit, and a short one for the time of a step.

    The better of two runs counts where a run can be repeated: what else the machine did isn't the node's.
    """
    rng = np.random.default_rng(secrets.randbits(64))
    prompt = rng.integers(0, status.contract.vocab_size, tokens, dtype=np.uint32)
    short = rng.integers(0, status.contract.vocab_size, tokens // SHORT, dtype=np.uint32)
    cold = await _timed(service, prompt)
    hits = [await _timed(service, prompt) for _ in range(2)]
    warm = min(hits, key=lambda run: run.shipment.ttft_s)
    smalls = [await _timed(service, short) for _ in range(2)]
    return {
        "ttft": {
            "prompt_tokens": tokens,
            "hit_tokens": warm.shipment.pages_hit * status.contract.page_tokens,
            "cold_ttft_s": cold.shipment.ttft_s,
            "ttft_s": warm.shipment.ttft_s,
            "prefill_s": warm.shipment.prefill_s,
            "exposed_transfer_s": warm.shipment.exposed_transfer_s,
            "shipped_pages": warm.shipment.pages_shipped,
        },
        "step": {
            "context_tokens": tokens,
            "step_s": min(run.step_s for run in (cold, *hits)),
            "short_context_tokens": len(short),
            "short_step_s": min(run.step_s for run in smalls),
        },
    }


async def _timed(service: DecodeService, prompt: UInt32Array) -> Timed:
    request = GenerateRequest(RequestId(secrets.token_hex(8)), prompt, Sampling(max_tokens=STEPS + 1))
    times: list[float] = []
    done: GenerateDone | None = None
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if isinstance(event, GenerateDone):
                done = event
            else:
                times.append(time.perf_counter())
    if done is None or len(times) < 2:
        raise ProtocolError("a probe ended before it had two tokens and an account", tokens=len(times))
    gaps = [after - before for before, after in pairwise(times)]
    return Timed(done.shipment, median(gaps))
