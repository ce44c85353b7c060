"""The tree against a dict from hash to page, and its integrity after every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import BoundsError, CapacityError, IntegrityError
from pdkv.ids import Int32Array, PageHash, PageHashes
from pdkv.kvcache.radix_node import Node, Use
from pdkv.kvcache.radix_tree import RadixTree
from tests.kvcache.chains import chain_of, long_chain

NUM_PAGES = 300
LETTERS = st.text("ab", min_size=1, max_size=7)


def ids(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def inserted(*prompts: str) -> RadixTree:
    """A tree with these prompts, pages numbered from 1 in the order of insertion."""
    tree = RadixTree(NUM_PAGES)
    for letters in prompts:
        first = len(tree) + 1
        known = tree.match(chain_of(letters)).pages
        new = np.arange(first, first + len(letters) - known.size, dtype=np.int32)
        tree.insert(chain_of(letters), np.concatenate((known, new)))
    return tree


def nodes(tree: RadixTree) -> Iterator[Node]:
    stack = [tree.root]
    while stack:
        yield (node := stack.pop())
        stack += node.children.values()


class Model:
    """What must be true, from a dict of pages and a list of locked prompts."""

    def __init__(self) -> None:
        self.page_of: dict[PageHash, int] = {}
        self.locked: list[tuple[PageHashes, Node]] = []

    def known(self, hashes: PageHashes) -> list[int]:
        found = [self.page_of.get(h) for h in hashes]
        return [p for p in found[: found.index(None) if None in found else None] if p is not None]

    def locked_hashes(self) -> set[PageHash]:
        return {h for hashes, _ in self.locked for h in hashes}

    def agree(self, tree: RadixTree) -> None:
        tree.check([node for _, node in self.locked])
        assert len(tree) == len(self.page_of)
        assert tree.locked == len(self.locked_hashes() & self.page_of.keys())
        assert tree.evictable == len(tree) - tree.locked
        assert np.flatnonzero(tree.holds(np.arange(NUM_PAGES))).tolist() == sorted(self.page_of.values())
        pages = ids(*self.page_of.values())
        assert tree.hashes(pages).tobytes() == b"".join(self.page_of)


def step(tree: RadixTree, model: Model, what: str, hashes: PageHashes, number: int) -> None:
    known = model.known(hashes)
    match what:
        case "insert":
            free = (p for p in range(1, NUM_PAGES) if p not in model.page_of.values())
            pages = ids(*(next(free) for _ in hashes))
            done = tree.insert(hashes, pages)
            assert done.existing.tolist() == known
            model.page_of |= dict(list(zip(hashes, pages.tolist(), strict=True))[len(known) :])
            assert tree.pages_to(done.node).tolist() == model.known(hashes)
        case "match":
            found = tree.match(hashes, limit=number)
            assert found.pages.tolist() == known[:number]
        case "lock":
            match = tree.match(hashes, limit=number)
            before = tree.evictable
            expected = tree.would_lock(match)
            node = tree.boundary(match)
            assert tree.pages_to(node).tolist() == known[:number]
            assert tree.evictable == before
            tree.lock(node)
            assert tree.evictable == before - expected
            model.locked.append((hashes.part(0, match.pages.size), node))
        case "unlock" if model.locked:
            tree.unlock(model.locked.pop(number % len(model.locked))[1])
        case "evict":
            evict(tree, model, number)


def evict(tree: RadixTree, model: Model, count: int) -> None:
    if count > tree.evictable:
        with pytest.raises(CapacityError):
            tree.evict(count)
        return
    gone = set(tree.evict(count).tolist())
    assert len(gone) == count
    lost = {h for h, page in model.page_of.items() if page in gone}
    assert not lost & model.locked_hashes()
    model.page_of = {h: page for h, page in model.page_of.items() if h not in lost}


STEPS = st.tuples(st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]), LETTERS, st.integers(0, 7))


@settings(max_examples=200)
@given(st.lists(STEPS, min_size=8, max_size=30))
def test_against_a_dict(steps: list[tuple[str, str, int]]) -> None:
    tree, model = RadixTree(NUM_PAGES), Model()
    for what, letters, number in steps:
        step(tree, model, what, chain_of(letters), number)
        model.agree(tree)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_an_edge_is_compared_to_the_page(length: int, shared: int, limit: int) -> None:
    shared = min(shared, length)
    stored, asked = "s" * length, "s" * shared + "t" * (40 - shared)
    tree = inserted(stored)
    assert tree.match(chain_of(asked), limit=limit).pages.size == min(shared, limit)


def test_a_chain_is_found_in_logarithmic_steps() -> None:
    pages = 16_384
    tree = RadixTree(pages + 1)
    hashes = long_chain("long", pages)
    tree.insert(hashes, np.arange(1, pages + 1, dtype=np.int32))
    for asked in (hashes, PageHashes(hashes.part(0, 9_999).raw + long_chain("other", 6_385).raw)):
        before = tree.work.nodes, tree.work.probes
        tree.match(asked)
        assert tree.work.nodes - before[0] == 1
        assert tree.work.probes - before[1] <= 15


def test_a_match_changes_nothing() -> None:
    tree = inserted("abcd")
    before = [(node.locks, node.last_used, node.pages.size) for node in nodes(tree)]
    tree.match(chain_of("abx"))
    assert [(node.locks, node.last_used, node.pages.size) for node in nodes(tree)] == before


def test_a_split_keeps_locks_and_the_locker_holds_the_end() -> None:
    tree = inserted("abcd")
    node = tree.match(chain_of("abcd")).node
    tree.lock(node)
    upper = tree.boundary(tree.match(chain_of("ab")))
    assert (upper.locks, node.locks, node.parent) == (1, 1, upper)
    tree.check([node])
    tree.unlock(node)
    tree.check([])
    assert tree.evictable == 4


def test_a_lock_is_extended_downwards_only() -> None:
    tree = inserted("ab", "abcd", "x")
    above, below, beside = (tree.match(chain_of(s)).node for s in ("ab", "abcd", "x"))
    tree.lock(above)
    with pytest.raises(IntegrityError):
        tree.extend_lock(above, beside)
    tree.extend_lock(above, below)
    tree.check([below])
    tree.unlock(below)
    with pytest.raises(IntegrityError):
        tree.unlock(below)


def test_pages_that_one_request_commits_one_by_one_make_one_node() -> None:
    tree, hashes = RadixTree(NUM_PAGES), long_chain("long", 200)
    node = tree.root
    tree.lock(node, use=Use())
    for page in range(1, 201):
        before = tree.work.nodes
        node = tree.extend(node, hashes.part(page - 1, page), ids(page)).node
        tree.check([node])
        assert tree.work.nodes - before <= 2
    assert tree.match(hashes).node is node
    assert len(list(nodes(tree))) == 2
    assert tree.pages_to(node).tolist() == list(range(1, 201))
    tree.unlock(node)
    assert tree.evict(150).tolist() == list(range(51, 201))
    tree.check([])


@pytest.mark.parametrize(
    "shared", ["a lease", "a request", "a later one", "a child", "another kind", "not the caller's"]
)
def test_a_node_grows_only_while_it_is_the_callers_alone(shared: str) -> None:
    tree = RadixTree(NUM_PAGES)
    tree.lock(tree.root, use=Use())
    node = tree.extend(tree.root, chain_of("ab"), ids(1, 2)).node
    holders, use = [], Use()
    match shared:
        case "a lease":
            tree.lock(node)
            holders.append(node)
        case "a request":
            tree.lock(node, use=Use())
            holders.append(node)
        case "a later one":
            tree.lock(node, use=Use())
            tree.unlock(node)
        case "a child":
            tree.insert(chain_of("abx").part(2, 3), ids(9), below=node)
        case "another kind":
            use = Use(output=True)
        case "not the caller's":
            tree.unlock(node)
            node = tree.root
            tree.lock(node, use=Use())
    size = node.pages.size
    rest = chain_of("abc").part(2, 3) if node.parent else chain_of("z")
    below = tree.extend(node, rest, ids(3), use=use).node
    assert (below.parent, node.pages.size) == (node, size)
    tree.check([below, *holders])


def test_a_refused_extension_changes_nothing() -> None:
    tree = RadixTree(NUM_PAGES)
    tree.lock(tree.root, use=Use())
    node = tree.extend(tree.root, chain_of("ab"), ids(1, 2)).node
    for pages, match in ((ids(2), "not in the tree"), (ids(3, 4), "one a hash")):
        with pytest.raises(BoundsError, match=match):
            tree.extend(node, chain_of("abc").part(2, 3), pages)
        tree.check([node])
    assert node.pages.tolist() == [1, 2]


def test_both_parts_of_a_split_keep_what_is_known_of_their_use() -> None:
    tree = RadixTree(NUM_PAGES)
    tree.lock(tree.root, use=Use(priority=3))
    lower = tree.extend(tree.root, chain_of("abcd"), ids(1, 2, 3, 4), use=Use(priority=3)).node
    told = lower.created, lower.last_used, lower.uses, lower.priority, lower.output, lower.locks
    upper = tree.boundary(tree.match(chain_of("ab")))
    for node in (upper, lower):
        assert told == (node.created, node.last_used, node.uses, node.priority, node.output, node.locks)


def test_output_is_a_node_of_its_own_until_a_prompt_begins_with_it() -> None:
    tree = RadixTree(NUM_PAGES)
    tree.lock(tree.root, use=Use())
    prompt = tree.extend(tree.root, chain_of("ab"), ids(1, 2)).node
    answer = tree.extend(prompt, chain_of("abcd").part(2, 4), ids(3, 4), use=Use(output=True)).node
    assert answer.parent is prompt
    assert (prompt.output, answer.output) == (False, True)
    tree.unlock(answer)
    tree.lock(answer)  # a lease
    assert answer.output
    tree.unlock(answer)
    first = tree.boundary(tree.match(chain_of("abcx")))
    tree.lock(first, use=Use())
    assert (first.output, answer.output) == (False, True)
    tree.check([first])


def test_an_answer_that_was_a_prompt_before_stays_one() -> None:
    tree = inserted("abcd")
    prompt = tree.boundary(tree.match(chain_of("ab")))
    tree.lock(prompt, use=Use())
    node = tree.extend(prompt, chain_of("abcd").part(2, 4), ids(8, 9), use=Use(output=True)).node
    assert tree.pages_to(node).tolist() == [1, 2, 3, 4]
    assert not node.output


def test_the_least_recently_used_ends_go_first_and_only_as_much_as_needed() -> None:
    tree = inserted("ab", "cd", "ef")  # pages 1 to 6
    node = tree.match(chain_of("ab")).node
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(3).tolist() == [3, 4, 6]
    assert tree.match(chain_of("ef")).pages.tolist() == [5]
    assert tree.match(chain_of("ab")).pages.tolist() == [1, 2]


def test_insertion_goes_on_below_a_node() -> None:
    tree = inserted("ab")
    node = tree.match(chain_of("ab")).node
    done = tree.insert(chain_of("abcd").part(2, 4), ids(3, 4), below=node)
    assert tree.match(chain_of("abcd")).pages.tolist() == [1, 2, 3, 4]
    assert (done.node.parent, done.existing.size) == (node, 0)


def test_bad_insertions_are_refused() -> None:
    tree = inserted("ab")
    with pytest.raises(BoundsError, match="one a hash"):
        tree.insert(chain_of("xy"), ids(3))
    with pytest.raises(BoundsError, match="2; allowed: a page that is not in the tree"):
        tree.insert(chain_of("xy"), ids(3, 2))
    tree.check([])
    assert len(tree) == 2


def test_a_short_rest_does_not_keep_a_long_edge_in_memory() -> None:
    tree = RadixTree(NUM_PAGES)
    tree.insert(long_chain("long", 200), np.arange(1, 201, dtype=np.int32))
    tree.evict(199)
    (rest,) = (node for node in nodes(tree) if node.pages.size)
    assert rest.pages.base is None


def work_of_one_request(tree: RadixTree) -> tuple[int, int]:
    """Nodes and hashes looked at for a match, a lock, an insertion, an unlock and an eviction of 16 pages."""
    before = (tree.work.nodes, tree.work.probes)
    match = tree.match(long_chain("0", 24))
    tree.lock(match.node)
    last = len(tree) + 1
    below = tree.insert(long_chain("new", 16), np.arange(last, last + 16, dtype=np.int32), below=match.node).node
    tree.extend_lock(match.node, below)
    tree.unlock(below)
    tree.evict(16)
    return tree.work.nodes - before[0], tree.work.probes - before[1]


def test_the_work_does_not_grow_with_the_tree() -> None:
    work = []
    for prompts in (10, 100):
        tree = RadixTree(prompts * 24 + 50)
        for i in range(prompts):
            first = len(tree) + 1
            tree.insert(long_chain(str(i), 24), np.arange(first, first + 24, dtype=np.int32))
        work.append(work_of_one_request(tree))
    assert work[0] == work[1]
    assert work[0][0] < 20


@pytest.mark.parametrize(
    "broken", ["locks", "lost lock", "pages", "evictable", "leaf", "stamp", "held", "key", "parent", "output"]
)
def test_check_sees_what_is_wrong(broken: str) -> None:
    tree = inserted("ab", "abcd", "x")
    above, below = (tree.match(chain_of(s)).node for s in ("ab", "abcd"))
    tree.lock(above)
    tree.check([above])
    match broken:
        case "locks":
            below.locks = 2
        case "lost lock":
            above.locks = 0
        case "pages":
            tree._pages += 1
        case "evictable":
            tree._evictable -= 1
        case "leaf":
            tree._leaves.discard(below)
        case "stamp":
            below.last_used += 1
        case "held":
            tree._held[1] = False
        case "key":
            tree._hash[below.pages[0]] = bytes(32)
        case "parent":
            below.parent = tree.root
        case "output":
            above.output = True
    with pytest.raises(IntegrityError):
        tree.check([above])


def test_check_counts_locks_against_their_holders() -> None:
    tree = inserted("ab")
    node = tree.match(chain_of("ab")).node
    tree.lock(node)
    tree.check()
    with pytest.raises(IntegrityError, match="locks"):
        tree.check([])
    with pytest.raises(IntegrityError, match="locks"):
        tree.check([node, node])
