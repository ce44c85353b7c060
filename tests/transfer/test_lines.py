"""Which rails are joined, and what a node's metadata says of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, ProtocolError
from pdkv.transfer.descriptors import plan
from pdkv.transfer.lines import MAX_RAILS, Peer, pack, serving_agent, unpack
from tests.transfer.pools import TestPool, offer_of, peer_name

NAME = peer_name("prefill")


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=MAX_RAILS))
def test_metadata_is_packed_and_unpacked(metadata: list[bytes]) -> None:
    assert unpack(pack(metadata), NAME) == metadata


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.integers(1, 20))
def test_what_was_cut_is_refused_or_is_whole(metadata: list[bytes], cut: int) -> None:
    packed = pack(metadata)[:-cut]
    try:
        found = unpack(packed, NAME)
    except (ProtocolError, BoundsError):
        return
    assert found == metadata[: len(found)], "between two entries: that is what the checksum is for"


@pytest.mark.parametrize(
    ("packed", "error"),
    [
        (b"", BoundsError),
        (b"\x01", ProtocolError),
        (pack([b"a", b""]), ProtocolError),
        (b"\xff\xff\xff\xffabc", ProtocolError),
        (pack([b"a"] * (MAX_RAILS + 1)), BoundsError),
    ],
)
def test_what_is_no_list_of_rails_is_refused(packed: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match=str(NAME)):
        unpack(packed, NAME)


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs"),
    [
        (1, 1, [(0, 0)]),
        (2, 2, [(0, 0), (1, 1)]),
        (1, 2, [(0, 0), (0, 1)]),
        (2, 1, [(0, 0), (1, 0)]),
        (2, 3, [(0, 0), (1, 1), (0, 2)]),
        (4, 2, [(0, 0), (1, 1), (2, 0), (3, 1)]),
    ],
)
def test_every_rail_of_either_side_is_on_a_line(mine: int, theirs: int, pairs: list[tuple[int, int]]) -> None:
    pool = TestPool(num_pages=2, fill=False)
    offer = offer_of(pack([bytes([65 + i]) for i in range(theirs)]), pool)
    peer = Peer.offered(NAME, offer, plan(pool.map(), pool.map()), mine)
    assert [(line.rail, line.agent, line.metadata) for line in peer.lines] == [
        (here, serving_agent(NAME, there), bytes([65 + there])) for here, there in pairs
    ]
    assert peer.up == list(peer.lines)
