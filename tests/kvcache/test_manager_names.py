"""What a request finds in the cache: tenants, draft rules, loads that are under way, answers, priorities."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError, CapacityError, ReservationDead
from pdkv.ids import LeaseId, LocalPages, PageHashes
from pdkv.kvcache.eagle import EagleRule, recorded_tokens
from pdkv.kvcache.eviction import ORDERS, eviction_order
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.page_hash import chain, extend, namespace_seed
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.chains import chain_of, long_chain
from tests.kvcache.manager_model import FMT

PAGE = 64
FINGERPRINT = bytes(32)


class Bench:
    def __init__(self, usable_pages: int = 20, policy: str = "lru") -> None:
        self.pool = SlotPool.create(FMT, usable_pages + 1)
        self.manager = CacheManager(self.pool, order=eviction_order(policy))
        self.verifier = Verifier(self.pool)

    def reserve(self, hashes: PageHashes, total: int | None = None, *, priority: int = 0) -> Reservation:
        return self.manager.reserve(hashes, total or len(hashes), max_hit_pages=len(hashes), priority=priority)

    def commit(self, reservation: Reservation, count: int | None = None) -> LocalPages:
        first = reservation.committed
        stop = len(reservation.hashes) if count is None else first + count
        pages, hashes = reservation.sequence[first:stop], reservation.hashes.part(first, stop)
        return self.manager.commit(self.verifier.seal(reservation.id, first, pages, hashes))

    def cache(self, hashes: PageHashes, *, priority: int = 0) -> int:
        """Run a request with this prompt; how many of its pages were hit."""
        reservation = self.reserve(hashes, priority=priority)
        self.commit(reservation)
        self.manager.end(reservation)
        return len(reservation.hit)

    def answer(self, prompt: str, answer: str, *, spare: int = 0) -> Reservation:
        """A request whose decode has ended, with its answer committed."""
        reservation = self.reserve(chain_of(prompt), len(prompt) + len(answer) + spare)
        self.commit(reservation)
        self.manager.take_private(reservation, reservation.sequence[len(prompt) :])
        self.manager.extend(reservation, chain_of(prompt + answer).part(len(prompt), len(prompt + answer)))
        self.commit(reservation)
        return reservation

    def known(self, hashes: PageHashes) -> int:
        return self.manager.tree.match(hashes).pages.size


def tokens(count: int, *, last: int = 0) -> np.ndarray:
    column = np.arange(count, dtype=np.uint32)
    column[-1] += last
    return column


# --- names ------------------------------------------------------------------------------------------------------------


def test_tenants_share_no_page() -> None:
    bench = Bench(40)
    namespaces = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("abc", "")]
    prompts = [chain(tokens(5 * PAGE), seed=namespace_seed(FINGERPRINT, *names)) for names in namespaces]
    prompts.append(chain(tokens(5 * PAGE), seed=namespace_seed(bytes(31) + b"1", "", "")))
    assert [bench.cache(prompt) for prompt in prompts] == [0] * 7
    assert [bench.cache(prompt) for prompt in prompts] == [5] * 7
    assert len(bench.manager.tree) == 35
    bench.manager.check()


@pytest.mark.parametrize(("rule", "hit"), [(EagleRule.NONE, 2), (EagleRule.BIGRAM, 1)])
def test_a_bigram_page_is_shared_only_with_its_next_token(rule: EagleRule, hit: int) -> None:
    bench, bigram = Bench(), rule is EagleRule.BIGRAM
    prompts = [chain(tokens(2 * PAGE + 1, last=last), bigram=bigram) for last in (0, 1)]
    assert {len(p) for p in prompts} == {recorded_tokens(2 * PAGE + 1, rule) // PAGE} == {2}
    assert [bench.cache(p) for p in prompts] == [0, hit]
    assert [bench.cache(p) for p in prompts] == [2, 2]


def test_a_bigram_prompt_of_whole_pages_records_one_less() -> None:
    bench = Bench()
    prompt = chain(tokens(2 * PAGE), bigram=True)
    assert len(prompt) == recorded_tokens(2 * PAGE, EagleRule.BIGRAM) // PAGE == 1
    assert (bench.cache(prompt), bench.cache(chain(tokens(3 * PAGE), bigram=True))) == (0, 1)


def test_drop_page_gives_back_one_of_those_found() -> None:
    bench = Bench()
    bench.cache(chain_of("abcd"))
    for letters, hit in (("abcd", 3), ("abcx", 2), ("x", 0)):
        reservation = bench.manager.reserve(chain_of(letters), 4, max_hit_pages=9, drop_pages=1)
        assert len(reservation.hit) == hit
        bench.manager.end(reservation)
    bench.manager.check()


def test_a_split_keeps_what_is_locked() -> None:
    bench = Bench(8)
    long = bench.reserve(chain_of("abcd"))
    bench.commit(long)
    short = bench.reserve(chain_of("abx"), 3)  # splits
    bench.manager.check()
    bench.manager.end(short)
    with pytest.raises(CapacityError):
        bench.reserve(chain_of("y"), 5)
    bench.manager.end(long)
    assert len(bench.reserve(chain_of("y"), 8).pages) == 8


# --- loads that are under way -----------------------------------------------------------------------------------------


def test_nobody_finds_a_page_before_it_was_proved() -> None:
    bench = Bench()
    loading = bench.reserve(chain_of("abcd"))
    assert len(bench.reserve(chain_of("abcd")).hit) == 0
    verified = bench.verifier.seal(loading.id, 0, loading.sequence[:2], loading.hashes.part(0, 2))
    assert bench.known(chain_of("abcd")) == 0
    bench.manager.commit(verified)
    assert bench.known(chain_of("abcd")) == 2
    assert len(bench.reserve(chain_of("abcd")).hit) == 2


def test_pages_committed_one_by_one_are_found_in_one_step() -> None:
    pages = 300
    bench = Bench(2 * pages)
    prompt = long_chain("long", pages)
    reservation = bench.reserve(prompt)
    for _ in range(pages):
        bench.commit(reservation, 1)
    bench.manager.check()
    before = bench.manager.tree.work.nodes
    assert bench.known(prompt) == pages
    assert bench.manager.tree.work.nodes - before == 1


def test_what_a_lease_keeps_does_not_grow_with_the_request() -> None:
    bench = Bench()
    reservation = bench.reserve(chain_of("abcd"))
    bench.commit(reservation, 2)
    bench.manager.hand_over(reservation, LeaseId("lease"))
    bench.commit(reservation)
    bench.manager.end(reservation)
    bench.manager.check()
    assert bench.manager.tree.locked == 2


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_from_an_answer_finds_it() -> None:
    first = tokens(3 * PAGE + 10)
    bench = Bench()
    reservation = bench.reserve(chain(first), 6)
    bench.commit(reservation)
    tail = reservation.sequence[3:4]
    bench.manager.take_private(reservation, reservation.sequence[3:])
    bench.manager.seal_private(reservation, bench.verifier.seal(reservation.id, 3, tail, chain_of("t")))
    announced = bench.manager.generations(tail)
    bench.manager.reopen_private(reservation, tail)
    answer = np.arange(500, 500 + 2 * PAGE, dtype=np.uint32)
    written = np.concatenate((first, answer))
    hashes = extend(reservation.hashes.at(2), written[3 * PAGE : 5 * PAGE])
    bench.manager.extend(reservation, hashes)
    bench.manager.check()
    assert bench.manager.census()["private"] == 1  # the started last page
    assert bench.commit(reservation) == reservation.sequence[3:5]
    assert bench.manager.generations(tail) != announced
    bench.manager.end(reservation)
    bench.manager.check()
    following = bench.reserve(chain(np.concatenate((written, written))))
    assert following.hit == reservation.sequence[:5]


@pytest.mark.parametrize("policy", ORDERS)
def test_answers_are_evicted_before_older_prompts(policy: str) -> None:
    bench = Bench(8, policy)
    bench.cache(chain_of("xyz"))
    bench.manager.end(bench.answer("ab", "cd"))
    bench.manager.end(bench.reserve(chain_of("n"), 3))  # one is free
    assert (bench.known(chain_of("abcd")), bench.known(chain_of("xyz"))) == (2, 3)
    bench.manager.end(bench.reserve(chain_of("n"), 4))
    assert bench.known(chain_of("abcd")) + bench.known(chain_of("xyz")) == 4


def test_an_answer_counts_as_prompt_once_a_prompt_begins_with_it() -> None:
    bench = Bench(8)
    bench.cache(chain_of("xyz"))
    bench.manager.end(bench.answer("ab", "cd"))
    bench.manager.end(bench.reserve(chain_of("abcd")))
    bench.manager.end(bench.reserve(chain_of("n"), 3))
    assert (bench.known(chain_of("abcd")), bench.known(chain_of("xyz"))) == (4, 1)


def test_the_slower_of_two_equal_answers_keeps_its_pages_until_its_end() -> None:
    bench = Bench()
    first, second = bench.reserve(chain_of("ab"), 4), bench.reserve(chain_of("ab"), 4)
    for reservation in (first, second):
        bench.commit(reservation)
        bench.manager.extend(reservation, chain_of("abcd").part(2, 4))
        assert bench.commit(reservation) == first.sequence[2:]
    assert bench.manager.census()["private"] == 4
    bench.manager.end(second)
    assert bench.manager.census() | {"free": 0} == {
        "free": 0, "reserved": 0, "cached": 4, "private": 0, "quarantined": 0, "total": 20
    }  # fmt: skip
    bench.manager.check()


def test_an_answer_is_named_after_its_prompt_and_within_its_pages() -> None:
    bench = Bench()
    reservation = bench.reserve(chain_of("abc"), 5)
    bench.commit(reservation, 2)
    with pytest.raises(BoundsError, match="all of the prompt first"):
        bench.manager.extend(reservation, chain_of("d"))
    bench.commit(reservation)
    with pytest.raises(BoundsError, match="at most 2"):
        bench.manager.extend(reservation, chain_of("def"))
    bench.manager.quarantine(reservation, reservation.sequence[4:], "no end seen")
    with pytest.raises(BoundsError, match="quarantined"):
        bench.manager.extend(reservation, chain_of("de"))
    bench.manager.check()
    bench.manager.end(reservation)
    with pytest.raises(ReservationDead):
        bench.manager.extend(reservation, chain_of("d"))


def test_a_request_that_ends_before_its_answer_is_committed_leaves_none() -> None:
    bench = Bench(6)
    reservation = bench.reserve(chain_of("ab"), 4)
    bench.commit(reservation)
    bench.manager.extend(reservation, chain_of("cd"))
    bench.manager.end(reservation)
    assert bench.manager.census()["free"] == 4
    assert bench.known(chain_of("ab")) == 2


# --- priorities -------------------------------------------------------------------------------------------------------


def test_the_least_important_pages_go_first_and_a_hit_by_an_important_request_counts() -> None:
    bench = Bench(6, "priority")
    bench.cache(chain_of("ab"), priority=1)
    bench.cache(chain_of("cd"), priority=0)
    bench.cache(chain_of("ef"), priority=0)
    bench.cache(chain_of("cd"), priority=2)
    bench.manager.end(bench.reserve(chain_of("n"), 2))
    assert [bench.known(chain_of(s)) for s in ("ab", "cd", "ef")] == [2, 2, 0]
    bench.manager.end(bench.reserve(chain_of("n"), 4))
    assert [bench.known(chain_of(s)) for s in ("ab", "cd", "ef")] == [0, 2, 0]
    assert bench.manager.evicted_pages == 4
    bench.manager.check()
