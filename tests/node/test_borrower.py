"""What was lent is cut into pieces, and only what lies after the pages that are there is read."""

from __future__ import annotations

import pytest

from pdkv.errors import BoundsError
from pdkv.node import borrower
from pdkv.node.borrower import pieces
from tests.rpc.samples import pages


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 64])
def test_pieces(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    monkeypatch.setattr(borrower, "PIECE_PAGES", at_a_time)
    lent = pages(9, first_index=5)
    for first, stop in ((5, 14), (5, 6), (8, 13), (13, 14)):
        cut = list(pieces(lent, first, stop))
        assert [piece.first_index for piece in cut] == list(range(first, stop, at_a_time))
        part = slice(first - 5, stop - 5)
        assert b"".join(piece.hashes.raw for piece in cut) == lent.hashes.part(part.start, part.stop).raw
        for column in ("page_ids", "generations", "digests"):
            joined = [row for piece in cut for row in getattr(piece, column).tolist()]
            assert joined == getattr(lent, column)[part].tolist()
    assert list(pieces(lent, 7, 7)) == []


def test_what_was_not_lent_is_no_piece() -> None:
    with pytest.raises(BoundsError):
        list(pieces(pages(3, first_index=5), 4, 6))
    with pytest.raises(BoundsError):
        list(pieces(pages(3, first_index=5), 6, 9))
