"""Loads that must not pass: damage at the source, reuse during the read; and what shadow mode makes of them."""

import pytest
import torch

from pdkv.kvcache.verifier import Verifier
from tests.adapters.vllm.engines import TOKENS, pair, prompt


@pytest.fixture
def sealed_then_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is made of the bytes as they were, then the engine writes to the block: what must never happen."""
    seal = Verifier.seal

    def sealing(self: Verifier, *args: object) -> object:
        proved = seal(self, *args)  # type: ignore[arg-type]
        piece = self.pool.pieces(self.pool.fmt.segments[1].group)[1]
        self.pool.piece_view(piece)[2, 0] ^= torch.tensor(1, dtype=torch.uint8)
        return proved

    monkeypatch.setattr(Verifier, "seal", sealing)


@pytest.mark.usefixtures("sealed_then_changed")
def test_one_bit_is_found_and_the_blocks_from_there_on_are_bad() -> None:
    with pair() as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        done = d.until(lambda r: r.received)
        assert done.failed == {"r"}
        assert done.bad_blocks == {11, 12, 13}
        counts = d.side.tally.take()
        assert (counts["proofs_failed"], counts["loads_failed/DigestMismatch"]) == (1, 1)
        assert counts["bytes_loaded"] == 2 * 3 * len(p.bytes_of(1)), "read once more before it was given up"
        assert p.until(lambda r: r.sent).sent == {"r"}, "the other engine gets its blocks back all the same"


@pytest.mark.usefixtures("sealed_then_changed")
def test_in_shadow_mode_it_is_counted_and_goes_through() -> None:
    with pair(shadow=True) as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        done = d.until(lambda r: r.received)
        assert (done.failed, done.bad_blocks) == (set(), set())
        counts = d.side.tally.take()
        assert (counts["proofs_failed"], counts["pages_loaded"]) == (1, 3)


def test_without_damage_nothing_is_counted_in_either_mode() -> None:
    for shadow in (False, True):
        with pair(shadow=shadow) as (p, d):
            p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
            d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
            assert d.until(lambda r: r.received).failed == set()
            assert "proofs_failed" not in d.side.tally.take()
