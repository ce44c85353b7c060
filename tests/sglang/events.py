"""Events of a pdkv publisher, over ZMQ, in SGLang's own types: what they are, and what they say of every page."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from tests.adapters.events.consumers import LAYOUTS
from tests.checks import Checks
from tests.sglang.sides import PAGE, Known, Ours, Prompt, Theirs, plain

TYPES = (AllBlocksCleared, BlockStored, BlockRemoved)


def run(checks: Checks) -> dict[str, Any]:
    draw = random.Random(5)

    def some(count: int) -> list[int]:
        return [draw.randrange(150_000) for _ in range(count)]

    prefix = some(300)
    asked = [Prompt(some(70)), Prompt(prefix + some(100)), Prompt(prefix + some(1500)), Prompt(some(64))]
    asked += [Prompt(prefix + some(100), "tenant-a"), Prompt(prefix, "tenant-b"), Prompt(some(200), "", "adapter")]
    due = Known()
    for prompt in asked:
        due.hear(said_by_sglang(prompt))
    with Ours() as node:
        for prompt in asked:
            node.serve(prompt)
        heard = [*node.heard()]
        _types(checks, heard)
        known = Known().hear(heard)
        checks.that(not known.unlike(due), f"events: ids, parents, tokens and salts of {len(due.parent_of)} pages")
        _controls(checks, heard, due)
        node.evict(len(set(due.standing)))
        checks.that(not node.known().standing, "events: when all pages are evicted, nothing stands")
    _other_encoding(checks)
    _pairs(checks)
    _copies(checks)
    return {"events": len(heard), "pages": len(due.parent_of), "salts": sorted({s for s in due.salt_of.values() if s})}


def said_by_sglang(prompt: Prompt, *, bigram: bool = False) -> list[Any]:
    """What SGLang's recorder says of this prompt alone."""
    root, node = TreeNode(), TreeNode()
    root.key, root.hash_value = RadixKey(array("q")), []
    node.key, node.parent = prompt.key(bigram=bigram).page_aligned(PAGE), root
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    recorder.record_store(node)
    events: list[Any] = recorder.take()
    return events


def _types(checks: Checks, heard: list[Any]) -> None:
    checks.that(isinstance(heard[0], AllBlocksCleared), "events: the first says that nothing is stored")
    checks.that(all(isinstance(each, TYPES) for each in heard), f"events: {len(heard)} are of SGLang's types")
    stored = [each for each in heard if isinstance(each, BlockStored)]
    removed = [each for each in heard if isinstance(each, BlockRemoved)]
    facts = {(each.block_size, each.lora_id, each.lora_name, each.session_id) for each in stored}
    checks.that(
        facts == {(PAGE, None, None, None)}, f"events: {len(stored)} runs of pages of {PAGE}, no lora, no session"
    )
    media = {each.medium for each in stored + removed}
    checks.that(media == {StorageMedium.GPU.value}, f"events: {len(removed)} removals and all runs are on the GPU")


def _controls(checks: Checks, heard: list[Any], due: Known) -> None:
    """What is lost or altered is seen."""

    def unlike(events: list[Any]) -> list[str]:
        return Known().hear(events).unlike(due)

    runs = [at for at, each in enumerate(heard) if isinstance(each, BlockStored) and len(each.block_hashes) > 1]
    lost = [unlike(heard[:at] + heard[at + 1 :]) for at in runs]
    checks.that(runs and all(lost), f"events: each of {len(runs)} lost events is seen")
    salted = next(at for at in runs if heard[at].cache_salt)
    inner = next(at for at in runs if heard[at].parent_block_hash is not None)
    for at, field, value in (
        (salted, "cache_salt", "tenant-b"),
        (inner, "parent_block_hash", heard[inner].parent_block_hash + 1),
        (inner, "token_ids", heard[inner].token_ids[::-1]),
        (inner, "block_hashes", heard[inner].block_hashes[::-1]),
    ):
        altered = msgspec.structs.replace(heard[at], **{field: value})
        checks.that(unlike([*heard[:at], altered, *heard[at + 1 :]]), f"events: another {field} is seen")
    for field, value in (("block_hashes", ["1"]), ("token_ids", [1.5]), ("block_size", None), ("type", "BlockLost")):
        wrong = plain(heard[salted : salted + 1])[0] | {field: value}
        checks.that(not _read([0.0, [wrong], 0]), f"events: SGLang's types refuse {field}: {value}")


def _read(batch: list[Any]) -> bool:
    """Whether SGLang's type takes it."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    except msgspec.ValidationError:
        return False
    return True


def _other_encoding(checks: Checks) -> None:
    """Fields by position, which SGLang had up to 0.5.19."""
    with Ours(encoding="array", layout=LAYOUTS["array"]["sglang, positional"]) as node:
        node.serve(Prompt([*range(200)]))
        by_position = [msgspec.to_builtins(each) for each in node.heard()]
        checks.that(not _read([0.0, by_position, 0]), "events: by position they are refused by SGLang's types")


def _pairs(checks: Checks) -> None:
    """Under the bigram rule both send pairs, which SGLang's own type takes for no tokens."""
    prompt = Prompt([*range(500, 800)])
    with Ours(bigram=True) as node:
        node.serve(prompt)
        known = node.known()
    tree = Theirs("RadixCache", bigram=True)
    tree.serve(prompt)
    theirs = tree.known()
    checks.that(theirs.standing and not known.unlike(theirs), f"events: {len(theirs.standing)} pages of pairs")
    checks.that(not _read([0.0, plain(tree.events), 0]), "events: SGLang's types don't read SGLang's own pairs either")


def _copies(checks: Checks) -> None:
    """The copies of SGLang's types that `make test` reads with have its names, in its order."""
    batch = LAYOUTS["map"]["sglang, named"]
    union = next(field.type for field in msgspec.structs.fields(batch) if field.name == "events").__args__[0]
    mine = {each.__name__: [field.name for field in msgspec.structs.fields(each)] for each in union.__args__}
    due = {each.__name__: [field.name for field in msgspec.structs.fields(each)] for each in TYPES}
    checks.that(mine == due, "events: the types in tests/adapters/events/consumers.py have SGLang's fields")
