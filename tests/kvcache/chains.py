"""Hash chains of made-up prompts: a page is a letter, and the chain covers all letters before it."""

from __future__ import annotations

import hashlib

from pdkv.ids import PageHashes


def chain_of(letters: str) -> PageHashes:
    last, out = b"", []
    for letter in letters:
        last = hashlib.sha256(last + letter.encode()).digest()
        out.append(last)
    return PageHashes(b"".join(out))


def long_chain(name: str, pages: int) -> PageHashes:
    last, out = name.encode(), []
    for _ in range(pages):
        last = hashlib.sha256(last).digest()
        out.append(last)
    return PageHashes(b"".join(out))
