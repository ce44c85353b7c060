"""Events as bytes: the formats of vLLM and SGLang, which Dynamo and llm-d read too.

Guarantees: a batch is always an array of three, [time, events, rank], as Dynamo and llm-d insist; an event is its tag
and fields, by position ("array") or by name ("map"), in vLLM's order, which begins with SGLang's:

    BlockStored   block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name[, extra_keys]
    BlockRemoved  block_hashes, medium
    AllBlocksCleared

By position there are exactly these, since llm-d counts them; extra_keys, which carries a salt, only with the first page
of a salted prompt. Token ids of a bigram chain are pairs, as SGLang writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pdkv.adapters.events import Encoding
from pdkv.kvcache.events import AllCleared, Event, PagesRemoved, PagesStored

MEDIUM = "GPU"
"""What routers take for the tier that an engine computes on, which a pool always is here."""
RANK = 0
"""A node is one rank and publishes at an address of its own."""

_NAMES = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_encoder = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[Event], encoding: Encoding, now_s: float) -> bytes:
    """One message's payload. `now_s`: seconds since 1970."""
    write = _positional if encoding == "array" else _named
    return _encoder.encode([now_s, [write(event) for event in events], RANK])


def _positional(event: Event) -> list[object]:
    match event:
        case PagesStored():
            return ["BlockStored", *_stored(event)]
        case PagesRemoved():
            return ["BlockRemoved", event.ids.tolist(), MEDIUM]
        case AllCleared():
            return ["AllBlocksCleared"]


def _named(event: Event) -> dict[str, object]:
    tag, *fields = _positional(event)
    named = {"type": tag, **dict(zip(_NAMES[str(tag)], fields, strict=False))}
    if isinstance(event, PagesStored) and event.cache_salt:
        named["cache_salt"] = event.cache_salt
    return named


def _stored(event: PagesStored) -> list[object]:
    tokens = np.stack((event.tokens[:-1], event.tokens[1:]), axis=1) if event.bigram else event.tokens
    fields = [event.ids.tolist(), event.parent, tokens.tolist(), event.page_tokens, None, MEDIUM, None]
    if event.cache_salt and event.parent is None:
        fields.append([[event.cache_salt], *[None] * (event.ids.size - 1)])
    return fields
