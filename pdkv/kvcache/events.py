"""Which pages the tree has, told under the names that other systems know: the public chain.

Guarantees: a page's public id follows from its tokens, the cache salt and the unit rule alone, never from the content
fingerprint or an extra_key, and is the id that SGLang publishes for that page (tests/golden/page_hash.json); ids stored
less ids removed are the ids of the pages in the tree, each once, whatever namespaces they stand in. Pure; columns in,
columns out.

The manager tells an `Observer` what happened, as page ids; a `PublicPages` turns that into events. The two are apart so
that the work can be done by another thread than the manager's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.page_hash import chain, event_ids

Int64Array = npt.NDArray[np.int64]

_SALT_DOMAIN = b"sglang-cache-salt-v1\0"


def public_seed(cache_salt: str) -> bytes | None:
    """The 32 bytes before the first page of a salted request; none without a salt.

    SGLang's (`compute_node_event_hash_values` in its mem_cache/utils.py), which leaves extra_key out.
    """
    return hashlib.sha256(_SALT_DOMAIN + cache_salt.encode("utf-8", "surrogatepass")).digest() if cache_salt else None


class PublicChain:
    """The tokens of one request and the public hashes of its full pages, computed as far as they are asked for.

    One thread may `grow` it while another one asks: tokens are only added, and only the asking thread hashes.
    """

    def __init__(
        self, tokens: UInt32Array, *, page_tokens: int = 64, cache_salt: str = "", bigram: bool = False
    ) -> None:
        self.page_tokens = page_tokens
        self.cache_salt = cache_salt
        self.bigram = bigram
        self._tokens = tokens
        self._ids = array("q")
        self._last: bytes | None = public_seed(cache_salt)
        """Hash of the last page that was hashed."""

    def __len__(self) -> int:
        """Full pages."""
        return max(self._tokens.size - self.bigram, 0) // self.page_tokens

    def grow(self, tokens: UInt32Array) -> None:
        """Tokens after those known: an answer's."""
        self._tokens = np.concatenate((self._tokens, tokens))

    def tokens(self, first: int, stop: int) -> UInt32Array:
        """uint32: those of pages [first, stop); with `bigram` one more, the lookahead of the last one."""
        return self._tokens[first * self.page_tokens : stop * self.page_tokens + self.bigram]

    def ids(self, first: int, stop: int) -> list[int]:
        """Signed 64-bit ids of full pages [first, stop). What was hashed before is not hashed again."""
        tokens = self.tokens(len(self._ids), stop)
        hashes = chain(tokens, page_tokens=self.page_tokens, seed=self._last, bigram=self.bigram)
        if len(hashes):
            self._ids.extend(event_ids(hashes))
            self._last = hashes.at(len(hashes) - 1)
        return self._ids[first:stop].tolist()


@dataclass(frozen=True, slots=True)
class PagesStored:
    """A run of consecutive pages that can be hit from now on."""

    ids: Int64Array
    parent: int | None
    """Id of the page before the run; none at the beginning of a prompt."""
    tokens: UInt32Array
    """page_tokens a page; with `bigram` one more, the lookahead of the last one."""
    page_tokens: int
    cache_salt: str
    bigram: bool

    def parts(self, max_pages: int) -> Iterator[PagesStored]:
        """The same run as runs of at most `max_pages`, each the child of the one before."""
        for first in range(0, self.ids.size, max_pages):
            stop = min(first + max_pages, self.ids.size)
            yield PagesStored(
                ids=self.ids[first:stop],
                parent=int(self.ids[first - 1]) if first else self.parent,
                tokens=self.tokens[first * self.page_tokens : stop * self.page_tokens + self.bigram],
                page_tokens=self.page_tokens,
                cache_salt=self.cache_salt,
                bigram=self.bigram,
            )


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that can't be hit any more, in no order that matters."""

    ids: Int64Array


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is stored: whatever was said before is void."""


Event = PagesStored | PagesRemoved | AllCleared


class Observer(Protocol):
    """Hears from the manager what happens to its tree, in order, amid the manager's work: must not block or raise."""

    def stored(self, public: PublicChain, first: int, pages: LocalPages) -> None:
        """Pages [first, first + len(pages)) of the sequence went into the tree; all before them were there."""
        ...

    def removed(self, pages: LocalPages) -> None:
        """These pages left the tree; nothing in it went on from them."""
        ...

    def moved(self, source: LocalPages, target: LocalPages) -> None:
        """Page i of `source` in the tree is now page i of `target`: nothing that a subscriber would hear of."""
        ...


class PublicPages:
    """The public ids of the pages in one tree: turns what the manager tells into events.

    Two namespaces that differ in their extra_key alone give the same id to different pages. Such an id is stored when
    the first of them comes and removed when the last one goes, so a count is kept for each id that stands.
    """

    def __init__(self, num_pages: int) -> None:
        self._ids = np.zeros(num_pages, np.int64)
        self._told = np.zeros(num_pages, np.bool_)
        """A page whose tokens nobody knew when it was stored is never told of."""
        self._standing: Counter[int] = Counter()

    def standing(self) -> Int64Array:
        """int64, sorted: ids stored and not removed."""
        return np.sort(np.fromiter(self._standing, np.int64, len(self._standing)))

    def stored(self, public: PublicChain, first: int, pages: LocalPages) -> PagesStored | None:
        """None if there is nothing new to say."""
        stop = min(first + len(pages), len(public))
        if stop <= first:
            return None
        ids = public.ids(first, stop)
        at = pages.array[: stop - first].astype(np.intp)
        self._ids[at] = ids
        self._told[at] = True
        # What stands in another namespace is a prefix of the run: there too, no page stands without those before it.
        known = next((i for i, id_ in enumerate(ids) if id_ not in self._standing), len(ids))
        self._standing.update(ids)
        if known == len(ids):
            return None
        new = first + known
        return PagesStored(
            ids=np.array(ids[known:], np.int64),
            parent=public.ids(new - 1, new)[0] if new else None,
            tokens=public.tokens(new, stop),
            page_tokens=public.page_tokens,
            cache_salt=public.cache_salt,
            bigram=public.bigram,
        )

    def moved(self, source: LocalPages, target: LocalPages) -> None:
        """The ids go with the pages."""
        old, new = (pages.array.astype(np.intp) for pages in (source, target))
        self._ids[new] = self._ids[old]
        self._told[new] = self._told[old]
        self._told[old] = False

    def removed(self, pages: LocalPages) -> PagesRemoved | None:
        """None if there is nothing to say."""
        at = pages.array.astype(np.intp)
        at = at[self._told[at]]
        self._told[at] = False
        gone: list[int] = []
        for id_ in self._ids[at].tolist():
            self._standing[id_] -= 1
            if not self._standing[id_]:
                del self._standing[id_]
                gone.append(id_)
        return PagesRemoved(np.array(gone, np.int64)) if gone else None
