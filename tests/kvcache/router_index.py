"""What a KV-aware router keeps of one node: the blocks it was told of, and how they hang together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class RouterIndex:
    """Complains about whatever a router would have to guess at."""

    parent_of: dict[int, int | None] = field(default_factory=dict)
    tokens_of: dict[int, tuple[object, ...]] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        return sorted(self.parent_of)

    def stored(self, ids: list[int], parent: int | None, tokens: list[object], page_tokens: int) -> None:
        assert ids, "an event without a page"
        assert len(tokens) == len(ids) * page_tokens, "tokens of whole pages"
        assert parent is None or parent in self.parent_of, f"{ids} go on from {parent}, which is not stored"
        for at, id_ in enumerate(ids):
            assert id_ not in self.parent_of, f"{id_} stored twice"
            self.parent_of[id_] = parent
            self.tokens_of[id_] = tuple(map(_hashable, tokens[at * page_tokens : (at + 1) * page_tokens]))
            parent = id_

    def removed(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            assert id_ in self.parent_of, f"{id_} removed, but not stored"
            del self.parent_of[id_], self.tokens_of[id_]
        orphans = {p for p in self.parent_of.values() if p is not None} - set(self.parent_of)
        assert not orphans, f"removed before what goes on from them: {orphans}"

    def cleared(self) -> None:
        self.parent_of.clear()
        self.tokens_of.clear()


def _hashable(token: object) -> object:
    return tuple(token) if isinstance(token, list) else token
