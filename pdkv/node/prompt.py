"""One prompt, as both nodes must see it: its pages, their hashes, its tail, and the account that admission compares.

Guarantees: everything here follows from the tokens, the namespace and the contract alone, so two nodes with equal
contracts reach equal accounts or a bug is found before decode starts. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import xxhash

from pdkv.contract import Contract
from pdkv.errors import AccountMismatch, BoundsError, Difference
from pdkv.ids import PageHashes, UInt32Array
from pdkv.kvcache.eagle import EagleRule, prefill_resume_tokens, recorded_tokens
from pdkv.kvcache.events import PublicChain
from pdkv.kvcache.page_hash import chain, extend, namespace_seed, tail_hash
from pdkv.node.messages import Account, DraftHandoff, Namespace


@dataclass(frozen=True, slots=True)
class Prompt:
    """`hashes` covers the recorded pages; what lies beyond them (0 to 1 page) is the private tail."""

    tokens: UInt32Array
    page_tokens: int
    hashes: PageHashes
    last_hash: bytes
    """Of the last recorded page, or the namespace's seed: what the tail and an answer's pages go on from."""
    recorded_tokens: int
    resume_tokens: int
    """The longest cached prefix prefill may build on: at least one token is left to compute."""
    tail_hash: bytes
    """32 bytes, or empty when every token lies in a recorded page."""
    drop_pages: int
    """Pages that a lookup gives back of those it found."""
    public: PublicChain = field(compare=False)
    """How KV events name its pages; not computed before somebody asks."""

    @property
    def pages(self) -> int:
        return -(-len(self.tokens) // self.page_tokens)

    @property
    def recorded_pages(self) -> int:
        return len(self.hashes)

    @property
    def tail_tokens(self) -> int:
        return len(self.tokens) - self.recorded_tokens

    @property
    def prefill_hit_pages(self) -> int:
        """The most a lookup may find where at least one token must be computed, before pages are given back."""
        return (len(self.tokens) - 1) // self.page_tokens

    @property
    def decode_hit_pages(self) -> int:
        """The same where the first token comes from prefill: any recorded page will do, unless pages are given back."""
        return self.prefill_hit_pages if self.drop_pages else self.recorded_pages


def plan_prompt(tokens: UInt32Array, namespace: Namespace, contract: Contract) -> Prompt:
    """Raises `BoundsError` for an empty prompt or a token outside the vocabulary."""
    if len(tokens) == 0:
        raise BoundsError("prompt tokens", 0, "at least 1")
    if int(tokens.max()) >= contract.vocab_size:
        raise BoundsError("token id", int(tokens.max()), f"below the vocabulary size {contract.vocab_size}")
    rule = EagleRule(contract.eagle_rule)
    seed = namespace_seed(contract.content_fingerprint, namespace.extra_key, namespace.cache_salt)
    hashes = chain(tokens, page_tokens=contract.page_tokens, seed=seed, bigram=contract.bigram)
    recorded = recorded_tokens(len(tokens), rule, page_tokens=contract.page_tokens)
    hashes = hashes.part(0, recorded // contract.page_tokens)
    tail = tokens[recorded:]
    last = hashes.at(len(hashes) - 1) if len(hashes) else seed
    return Prompt(
        tokens=np.ascontiguousarray(tokens),
        page_tokens=contract.page_tokens,
        hashes=hashes,
        last_hash=last,
        recorded_tokens=recorded,
        resume_tokens=prefill_resume_tokens(len(tokens), rule, page_tokens=contract.page_tokens),
        drop_pages=1 if rule is EagleRule.DROP_PAGE else 0,
        tail_hash=tail_hash(last, tail) if len(tail) else b"",
        public=PublicChain(
            tokens, page_tokens=contract.page_tokens, cache_salt=namespace.cache_salt, bigram=contract.bigram
        ),
    )


def answer_hashes(prompt: Prompt, said: UInt32Array, contract: Contract) -> PageHashes:
    """Of the full pages after the recorded ones, when the answer `said` follows the prompt: the first of them began as
    its tail. The answer's last token has no row; a bigram chain takes it as what the last row looks ahead to.
    """
    tokens = np.concatenate((prompt.tokens[prompt.recorded_tokens :], said))
    hashed = tokens if contract.bigram else tokens[:-1]
    return extend(prompt.last_hash, hashed, page_tokens=prompt.page_tokens, bigram=contract.bigram)


def account_of(prompt: Prompt, contract: Contract, draft: DraftHandoff | None = None) -> Account:
    """What this node holds to be true of the prompt, and of the draft hand-off as it made or got it."""
    return Account(
        prompt_tokens=len(prompt.tokens),
        recorded_tokens=prompt.recorded_tokens,
        rollback_tokens=contract.rollback_tokens,
        resume_tokens=prompt.resume_tokens,
        eagle_rule=contract.eagle_rule,
        pages=prompt.pages,
        last_page_hash=prompt.hashes.raw[-32:],
        tail_hash=prompt.tail_hash,
        indexer_types=contract.indexer_types,
        draft_digest=draft_digest(draft),
    )


def draft_digest(draft: DraftHandoff | None) -> int:
    """xxh3_64 of all its columns, little-endian and each with its length; 0 for none."""
    if draft is None:
        return 0
    running = xxhash.xxh3_64(draft.logits_digest.to_bytes(8, "little"))
    columns = ((draft.hidden, "<f4"), (draft.tokens, "<u4"), (draft.probabilities, "<f4"), (draft.index_seed, "<i4"))
    for column, dtype in columns:
        raw = column.astype(dtype).tobytes()
        running.update(len(raw).to_bytes(8, "little") + raw)
    return running.intdigest()


def require_equal_accounts(mine: Account, theirs: Account) -> None:
    """Raises `AccountMismatch` with every differing field and both values."""
    differences = [
        Difference(f.name, _text(getattr(mine, f.name)), _text(getattr(theirs, f.name)), "equal")
        for f in fields(Account)
        if getattr(mine, f.name) != getattr(theirs, f.name)
    ]
    if differences:
        raise AccountMismatch(differences)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)
