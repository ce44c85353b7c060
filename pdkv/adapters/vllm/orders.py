"""What a scheduler tells its workers in a step, and the parameters that travel with a request between two engines.

Guarantees: plain values, picklable; parameters are those of vLLM's NixlConnector, by name and meaning, so whatever
carries those from a prefill to a decode engine carries these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdkv.ids import PageHashes, UInt64Array
from pdkv.kvcache.page_hash import chain, namespace_seed, tail_hash
from pdkv.rpc.convert.checks import ADDRESS

HOST_CHARACTERS = 255
"""Of a name in DNS, and more than any address has."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a prompt is computed with."""

    directory: str
    """Absolute: where its files are, on this machine."""
    taken_as: str
    """What the engine makes of them: how they are laid out, and in which dtype it has them."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What determines the names of a prompt's pages."""

    tokens: UInt64Array
    """Those of the vocabulary, and above 2^32 what stands for an item of another modality."""
    cache_salt: str = ""
    adapter: Adapter | None = None

    def names(self, fingerprint: bytes, adapter_key: str, page_tokens: int) -> PageHashes:
        """Of all its pages, the partly filled last one included; `fingerprint`: of the contract's content;
        `adapter_key`: of its adapter, "" without one."""
        seed = namespace_seed(fingerprint, adapter_key, self.cache_salt)
        full = chain(self.tokens, page_tokens=page_tokens, seed=seed)
        rest = self.tokens[len(full) * page_tokens :]
        if not rest.size:
            return full
        last = full.at(len(full) - 1) if len(full) else seed
        return PageHashes(full.raw + tail_hash(last, rest))


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A prompt that was computed: its blocks stay until they were read, or nobody wants them any more."""

    request_id: str
    prompt: Prompt
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A prompt that another engine has computed: bring its pages from `first_page` on into `blocks`.

    Without blocks there is nothing to bring: the other engine need not keep them any longer.
    """

    request_id: str
    prompt: Prompt
    blocks: tuple[int, ...]
    first_page: int
    host: str
    port: int
    """Of the other engine's first worker."""


@dataclass(frozen=True, slots=True)
class StepOrders:
    holds: list[Hold] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a prompt was computed."""

    host: str
    port: int
    tp_size: int


def remote_of(params: Mapping[str, Any]) -> Remote | str:
    """Where to, from a request's parameters, which whoever sends it may have written; or what is wrong with them."""
    host, port, tp = params.get("remote_host"), params.get("remote_port"), params.get("tp_size", 1)
    if not isinstance(host, str) or len(host) > HOST_CHARACTERS or not ADDRESS.fullmatch(f"{host}:1"):
        return f"remote_host is {host!r:.80}"
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
        return f"remote_port is {port!r:.80}"
    if isinstance(tp, bool) or not isinstance(tp, int) or not 0 < tp < 1 << 16:
        return f"tp_size is {tp!r:.80}"
    return Remote(host, port, tp)


def token_column(tokens: list[int], items: list[tuple[int, int, str]]) -> UInt64Array:
    """uint64 [n]. `items`: (first place, places, identifier) of what isn't text: the tokens there are placeholders, the
    same for all items, so each becomes a number above 2^32 made of the identifier and its place in the item."""
    column = np.array(tokens, np.uint64)
    for first, places, identifier in items:
        base = int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:7], "little") | 1 << 60
        part = column[first : first + places]
        part[:] = np.uint64(base) + np.arange(part.size, dtype=np.uint64)
    return column
