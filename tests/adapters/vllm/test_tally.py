"""What is counted."""

from pdkv.adapters.vllm.loads import Loaded
from pdkv.adapters.vllm.tally import NAMES, Tally
from pdkv.errors import ContractMismatch, DigestMismatch, PeerLost


def test_counts_are_fetched_once_and_all_have_words() -> None:
    tally = Tally()
    tally.loaded(Loaded(3, 300, 6, 0.5, 0.25), 3)
    tally.loaded(Loaded(1, 100, 2, 0.25, 0.125, PeerLost("gone")), 4)
    tally.held(5)
    tally.refused(DigestMismatch("differs"))
    counts = tally.take()
    assert counts == {
        "loads": 2,
        "loads_failed/PeerLost": 1,
        "pages_loaded": 4,
        "pages_failed": 3,
        "bytes_loaded": 400,
        "descriptors": 8,
        "load_seconds": 0.75,
        "post_seconds": 0.375,
        "prompts_held": 1,
        "pages_held": 5,
        "proofs_failed": 1,
    }
    assert tally.take() == {}
    assert {name.partition("/")[0] for name in counts} <= set(NAMES)


def test_a_mismatch_is_counted_as_one_and_a_notice_is_no_load() -> None:
    tally = Tally()
    tally.refused(ContractMismatch([]))
    tally.loaded(Loaded(), 0)
    assert tally.take() == {"contract_mismatches": 1}
