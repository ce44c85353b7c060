"""Which prefill node can serve which decode node.

Guarantees: two nodes whose contracts are known and differ are never paired; a pair that refused each other by name is
not tried again until one of the two is in a new life, or a while has passed; a pair that only failed is passed over for
a while, and tried where nothing else is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.contract import require_compatible, require_equal_shards
from pdkv.errors import ContractMismatch, Difference, PdkvError
from pdkv.ids import PeerName
from pdkv.router.registry import Kind, Node, Pair, Registry

MISMATCH_S = 60.0
"""A refusal by name is believed for so long, should the nodes' lives not be known."""
FAILURE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: PdkvError
    lives: tuple[PeerName | None, PeerName | None]
    until_s: float
    final: bool


class Pairing:
    """What is known of pairs, beside what is known of their nodes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._refusals: dict[Pair, _Refusal] = {}
        self._compared: dict[tuple[Kind, Kind], Sequence[Difference]] = {}

    def refused(self, pair: Pair, error: PdkvError) -> None:
        """The two don't want each other: another pair has to be found."""
        self._note(pair, error, MISMATCH_S, final=True)

    def failed(self, pair: Pair, error: PdkvError) -> None:
        """The one couldn't reach the other."""
        self._note(pair, error, FAILURE_S, final=False)

    def bar(self, pair: Pair) -> PdkvError | None:
        """Why the pair must not be tried, if so."""
        mine, theirs = pair.decode.kind, pair.prefill.kind
        if mine is not None and theirs is not None and (differences := self._differences(mine, theirs)):
            return ContractMismatch(differences)
        refusal = self._standing(pair)
        return refusal.error if refusal is not None and refusal.final else None

    def clear(self, pair: Pair) -> bool:
        """Nothing speaks against it."""
        return self._standing(pair) is None

    def left(self, node: Node) -> None:
        """What is known of it goes with it."""
        self._refusals = {pair: known for pair, known in self._refusals.items() if node not in pair.nodes}

    def status(self) -> dict[str, str]:
        """The pairs that refused each other or failed, and why."""
        standing = {pair: self._standing(pair) for pair in list(self._refusals)}
        return {str(pair): f"{known.error.kind}: {known.error}" for pair, known in standing.items() if known}

    def _differences(self, mine: Kind, theirs: Kind) -> Sequence[Difference]:
        """As the two would find them themselves, when they connect."""
        known = self._compared.get((mine, theirs))
        if known is None:
            try:
                require_compatible(mine.contract, theirs.contract)
                require_equal_shards(mine.contract, theirs.contract)
                known = ()
            except ContractMismatch as error:
                known = error.differences
            self._compared[mine, theirs] = known
        return known

    def _note(self, pair: Pair, error: PdkvError, seconds: float, *, final: bool) -> None:
        self._refusals[pair] = _Refusal(error, _lives(pair), self._registry.now() + seconds, final)

    def _standing(self, pair: Pair) -> _Refusal | None:
        refusal = self._refusals.get(pair)
        if refusal is None:
            return None
        # A life that wasn't known then is the one that refused.
        born = any(was not in (None, now) for was, now in zip(refusal.lives, _lives(pair), strict=True))
        if born or self._registry.now() >= refusal.until_s:
            del self._refusals[pair]
            return None
        return refusal


def _lives(pair: Pair) -> tuple[PeerName | None, PeerName | None]:
    return pair.prefill.name, pair.decode.name
