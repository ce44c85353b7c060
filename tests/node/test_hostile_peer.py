"""What a faulty or hostile prefill node may say: decode checks it all before the first token leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import AccountMismatch, BoundsError, DigestMismatch, PeerLost, ProtocolError, StalePages
from pdkv.ids import PageHashes
from pdkv.node.messages import Accepted, PagesSealed, PrefillDone, PrefillEvent
from tests.node.scene import Meddler, alone, answers, changed, recovered, request, run
from tests.node.toy import Pair, make_pair

Change = Callable[[PrefillEvent], list[PrefillEvent]]


def sealed(**changes: Any) -> Change:
    return changed(PagesSealed, **changes)


def ended(**changes: Any) -> Change:
    return changed(PrefillDone, **changes)


def drop(kind: type) -> Change:
    return lambda event: [] if isinstance(event, kind) else [event]


def account(**changes: Any) -> Change:
    return ended(account=lambda event: replace(event.account, **changes))


def lease(ttl_s: float) -> Change:
    return changed(Accepted, ttl_s=ttl_s)


MEDDLING: dict[str, tuple[Change, type[Exception], str]] = {
    "page out of the pool": (sealed(page_ids=lambda e: e.page_ids + 1000), BoundsError, "page id"),
    "the write sink": (sealed(page_ids=lambda e: e.page_ids * 0), BoundsError, "page id"),
    "one page twice": (sealed(page_ids=lambda e: e.page_ids * 0 + 5), BoundsError, "each page once"),
    "one generation too few": (sealed(generations=lambda e: e.generations[1:]), BoundsError, "columns"),
    "one digest too few": (sealed(digests=lambda e: e.digests[:, :1]), BoundsError, "columns"),
    "pages skipped": (sealed(first_index=lambda e: e.first_index + 1), ProtocolError, "announced"),
    "pages before the first": (sealed(first_index=-1), ProtocolError, "announced"),
    "no pages": (sealed(hashes=PageHashes()), ProtocolError, "announced"),
    "hashes of another prompt": (sealed(hashes=PageHashes(bytes(64))), ProtocolError, "hashes"),
    "an old generation": (sealed(generations=lambda e: e.generations - np.uint64(1)), StalePages, "reused"),
    "digests of other bytes": (sealed(digests=lambda e: e.digests + np.uint64(1)), DigestMismatch, "both"),
    "a page never announced": (drop(PagesSealed), ProtocolError, "not announced"),
    "never accepted": (drop(Accepted), ProtocolError, "out of order"),
    "no end": (drop(PrefillDone), PeerLost, "without PrefillDone"),
    "everything twice": (lambda event: [event, event], ProtocolError, "out of order"),
    "an event after the end": (
        lambda event: [event, event] if isinstance(event, PrefillDone) else [event],
        ProtocolError,
        "out of order",
    ),
    "no tail": (ended(tail=None), ProtocolError, "tail"),
    "a tail of other tokens": (
        ended(tail=lambda e: replace(e.tail, hashes=PageHashes(bytes(32)))),
        ProtocolError,
        "tail",
    ),
    "a tail elsewhere": (ended(tail=lambda e: replace(e.tail, first_index=1)), ProtocolError, "tail"),
    "a tail out of the pool": (ended(tail=lambda e: replace(e.tail, page_ids=np.array([64]))), BoundsError, "page id"),
    "a token that is none": (ended(first_token=257), ProtocolError, "first token"),
    "a token below zero": (ended(first_token=-1), ProtocolError, "first token"),
    "no probability": (ended(first_logprob=float("nan")), ProtocolError, "logprob"),
    "no time": (ended(prefill_s=float("nan")), ProtocolError, "prefill"),
    "chunks that fall": (ended(chunk_starts=(0, 128, 128)), ProtocolError, "rise"),
    "chunks past the end": (ended(chunk_starts=(0, 300)), ProtocolError, "rise"),
    "a lease without life": (lease(0.0), ProtocolError, "lease"),
    "a lease in the past": (lease(-1.0), ProtocolError, "lease"),
    "a lease of no length": (lease(float("nan")), ProtocolError, "lease"),
    "a lease for ever": (lease(float("inf")), ProtocolError, "lease"),
    "another layer list": (account(indexer_types=("full",)), AccountMismatch, "indexer_types"),
    "another rollback": (account(rollback_tokens=9), AccountMismatch, "rollback_tokens"),
    "another recorded length": (account(recorded_tokens=0), AccountMismatch, "recorded_tokens"),
    "another resume length": (account(resume_tokens=64), AccountMismatch, "resume_tokens"),
    "another last hash": (account(last_page_hash=bytes(32)), AccountMismatch, "last_page_hash"),
    "another tail hash": (account(tail_hash=bytes(32)), AccountMismatch, "tail_hash"),
    "another rule": (account(eagle_rule="bigram"), AccountMismatch, "eagle_rule"),
    "another token count": (account(prompt_tokens=1), AccountMismatch, "prompt_tokens"),
    "another page count": (account(pages=1), AccountMismatch, "pages"),
}


async def not_believed(pair: Pair, change: Change, kind: type[Exception], words: str, *, length: int = 300) -> None:
    """No token comes out, and nothing stays behind on either side."""
    pair.directory.peers["p0"] = Meddler(pair, change)
    events = pair.decode.generate(request(length))
    with pytest.raises(kind, match=words):
        await anext(events)
    pair.directory.peers["p0"] = pair.prefill
    await recovered(pair)


@pytest.mark.parametrize("what", MEDDLING)
def test_a_peer_that_says_otherwise_is_not_believed(what: str) -> None:
    run(lambda pair: not_believed(pair, *MEDDLING[what]), make_pair())


def test_a_tail_that_nobody_waits_for_is_refused() -> None:
    kept: list[PagesSealed] = []

    def change(event: PrefillEvent) -> list[PrefillEvent]:
        kept.extend([event] if isinstance(event, PagesSealed) else [])
        if not isinstance(event, PrefillDone):
            return [event]
        none = np.empty(0, np.int32)
        empty = replace(kept[-1], first_index=2, hashes=PageHashes(), page_ids=none)
        return [replace(event, tail=replace(empty, generations=none.astype(np.uint64), digests=kept[-1].digests[:0]))]

    run(lambda pair: not_believed(pair, change, ProtocolError, "tail", length=128), make_pair())


def test_untouched_words_are_believed() -> None:
    async def scenario(pair: Pair) -> None:
        pair.directory.peers["p0"] = Meddler(pair, lambda event: [event])
        asked = request(300)
        tokens, _ = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())
