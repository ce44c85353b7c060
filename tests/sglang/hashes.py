"""Page hashes of SGLang's own functions, and pdkv's: for every page size, length, namespace and kind of unit."""

from __future__ import annotations

import json
import random
from array import array
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.utils import (
    compute_node_event_hash_values,
    compute_node_hash_values,
    get_hash_str,
    get_storage_hash_str,
    hash_str_to_int64,
)

from pdkv.kvcache.events import PublicChain
from pdkv.kvcache.page_hash import chain, event_ids, extend
from tests.checks import Checks
from tests.sglang.sides import Prompt

SIZES = (1, 16, 64, 128, 256)
"""Tokens of a page."""
LENGTHS = (1, 63, 64, 65, 128, 129, 257, 1000, 20_000)
SALTS = ("", "tenant-a", "größer\0")
WIDE = (1 << 32) - 1, 1 << 32, (1 << 40) + 5
LONG = 1 << 20
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "page_hash.json").read_text())


def run(checks: Checks) -> dict[str, Any]:
    draw, equal, told = random.Random(3), 0, 0
    cases = list(product(SIZES, LENGTHS, (False, True)))
    prompts = {length: [draw.randrange(200_000) for _ in range(length)] for length in LENGTHS}
    for page, length, bigram in cases:
        tokens = prompts[length]
        equal += theirs(tokens, page, bigram=bigram) == ours(tokens, page, bigram=bigram)
        told += len(ours(tokens, page, bigram=bigram))
    checks.that(equal == len(cases), f"hashes: {equal} of {len(cases)} prompts have SGLang's ({told} pages)")
    for wide, bigram in product(WIDE, (False, True)):
        tokens = [*range(64), wide, *range(65, 200)]
        same = theirs(tokens, 64, bigram=bigram) == ours(tokens, 64, bigram=bigram)
        checks.that(same, f"hashes: a prompt with token {wide} has SGLang's{', of pairs' * bigram}")
    long = [(i * 2654435761) % 154880 for i in range(LONG)]
    last = theirs(long, 64)[-1]
    checks.that(last == ours(long, 64)[-1], f"hashes: the last of {LONG:,} tokens is SGLang's")
    checks.that(last in (v["last"] for v in GOLDEN["vectors"]), "hashes: and that of tests/golden/page_hash.json")
    _chains(checks, prompts[1000])
    events = _events(checks, prompts[1000])
    return {"prompts": len(cases), "pages": told, "pages_of_events": events}


def theirs(tokens: list[int], page: int, *, bigram: bool = False, prior: str | None = None) -> list[str]:
    key = RadixKey(array("q", tokens), is_bigram=bigram).page_aligned(page)
    found: list[str] = get_hash_str(key, prior, page)
    return found


def ours(tokens: list[int], page: int, *, bigram: bool = False) -> list[str]:
    return [bytes(each).hex() for each in chain(np.array(tokens), page_tokens=page, bigram=bigram)]


def _chains(checks: Checks, tokens: list[int]) -> None:
    """What goes on from a parent, and that the comparison sees what it should."""
    first, rest = tokens[:256], tokens[256:]
    whole, parent = ours(tokens, 64), theirs(first, 64)[-1]
    further = [bytes(each).hex() for each in extend(bytes.fromhex(parent), np.array(rest), page_tokens=64)]
    checks.that(
        theirs(rest, 64, prior=parent) == whole[4:] == further, "hashes: what goes on from SGLang's is SGLang's"
    )
    changed = theirs([*tokens[:200], tokens[200] + 1, *tokens[201:]], 64)
    unlike = [one != two for one, two in zip(changed, whole, strict=True)]
    checks.that(unlike == [at >= 3 for at in range(len(whole))], "hashes: another token is seen, from its page on")
    checks.that(theirs(tokens, 64) != ours(tokens, 128), "hashes: another page size is seen")
    checks.that(theirs(tokens, 64, bigram=True) != whole, "hashes: pairs for tokens are seen")
    ids = event_ids(chain(np.array(tokens)))
    checks.that([hash_str_to_int64(each) for each in whole] == ids, "hashes: as int64 they are SGLang's")
    little = [int.from_bytes(bytes.fromhex(each)[:8], "little", signed=True) for each in whole]
    checks.that(min(ids) < 0 < max(ids) and not set(little) & set(ids), "hashes: and another order of bytes is seen")
    storage = get_storage_hash_str(Prompt(tokens).key().page_aligned(64), page_size=64)
    checks.that(storage == whole, "hashes: SGLang's storage keys are these, without a namespace")
    salted = get_storage_hash_str(Prompt(tokens, "s").key().page_aligned(64), page_size=64)
    seeded = PublicChain(np.array(tokens, np.uint32), cache_salt="s").ids(0, len(whole))
    unlike = [hash_str_to_int64(one) != two for one, two in zip(salted, seeded, strict=True)]
    checks.that(all(unlike), "hashes: of a salted prompt SGLang's storage keys and events differ; pdkv has the events'")


def _events(checks: Checks, tokens: list[int]) -> int:
    """Ids in events, which a salt changes and an extra_key doesn't, in nodes of any lengths."""
    told = 0
    for page, bigram in product((16, 64, 128), (False, True)):
        mine = {}
        for salt in SALTS:
            public = PublicChain(np.array(tokens, np.uint32), page_tokens=page, cache_salt=salt, bigram=bigram)
            mine[salt] = public.ids(0, len(public))
        told += sum(map(len, mine.values()))
        equal = [
            node_ids(Prompt(tokens, salt, extra), page, at, bigram=bigram) == mine[salt]
            for salt, extra, at in product(SALTS, ("", "adapter"), (0, 1, 3))
        ]
        words = f"of {len(mine[''])} pages of {page}{', of pairs' * bigram}"
        checks.that(all(equal), f"hashes: ids {words} are SGLang's, with {len(SALTS)} salts and two extra_keys")
        checks.that(
            len({id_ for ids in mine.values() for id_ in ids}) == 3 * len(mine[""]), "hashes: no salt has another's"
        )
    return told


def node_ids(prompt: Prompt, page: int, split: int, *, bigram: bool) -> list[int]:
    """Of SGLang's tree nodes: the first has `split` pages, the second the rest."""
    root, key = TreeNode(), prompt.key(bigram=bigram).page_aligned(page)
    root.key, root.hash_value = RadixKey(array("q")), []
    found: list[int] = []
    parent = root
    for part in (key[: split * page], key[split * page :]) if split else (key,):
        node = TreeNode()
        node.key, node.parent = part, parent
        node.hash_value = compute_node_hash_values(node, page)
        found += map(hash_str_to_int64, compute_node_event_hash_values(node, page))
        parent = node
    return found
