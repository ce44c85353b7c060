"""SGLang's trees and pdkv's, given the same prompts in the same order: after each step both have said the same."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.checks import Checks
from tests.sglang.sides import PAGE, TREES, Ours, Prompt, Theirs

REQUESTS = 40
"""Of random prompts; all their pages fit."""


def run(checks: Checks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tree in TREES:
        for bigram in (False, True):
            name = f"{tree}{', pairs' * bigram}"
            theirs = Theirs(tree, bigram=bigram)
            with Ours(bigram=bigram) as ours:
                pages = Both(checks, name, theirs, ours).steps()
            with Ours(bigram=bigram) as ours:
                found[name] = {"pages": pages, "random": _random(checks, name, Theirs(tree, bigram=bigram), ours)}
            found[name]["runs_in"] = theirs.runs_in
        _extra_keys(checks, tree)
        _namespaces(checks, tree)
    return found


def page(name: str) -> list[int]:
    """The tokens of a page that has this letter. All begin alike, so that under the bigram rule, by which the last pair
    of a page has the next one's first token, the same pages are equal."""
    return [1, *(ord(name) * 1000 + at for at in range(1, PAGE))]


def of(letters: str, *, salt: str = "", extra: str = "") -> Prompt:
    """A page a letter, and some tokens of a page that is not full."""
    return Prompt([token for each in letters for token in page(each)] + [1, 8, 9], salt, extra)


class Both:
    def __init__(self, checks: Checks, name: str, theirs: Theirs, ours: Ours) -> None:
        self.checks, self.name, self.theirs, self.ours = checks, name, theirs, ours

    def same(self, words: str) -> int:
        mine, theirs = self.ours.known(), self.theirs.known()
        unlike = theirs.unlike(mine)
        self.checks.that(
            not unlike, f"trees: {self.name}: {words}: {len(theirs.standing)} pages {unlike or ''}".rstrip()
        )
        return len(theirs.standing)

    def serve(self, words: str, prompt: Prompt, had: int) -> None:
        hits = self.theirs.serve(prompt), self.ours.serve(prompt)
        self.checks.that(hits == (had, had), f"trees: {self.name}: {words}: {had} pages were there, {hits}")
        self.same(words)

    def steps(self) -> int:
        """The least recently used leaf is always a whole run, because SGLang evicts no less."""
        self.serve("a prompt", of("abcdefgh"), 0)
        self.serve("another that leaves it inside", of("abcdxyz"), 4)
        self.serve("the same with a salt", of("abcdxy", salt="tenant-a"), 0)
        self.serve("and one that goes on", of("abcdxypq", salt="tenant-a"), 6)
        self.serve("a hit of all", of("abcdefgh"), 8)
        # a lookup that ends inside a run splits it in SGLang's tree, a request that does in pdkv's
        found = self.theirs.hit(of("abc")), self.ours.serve(of("abc"))
        self.checks.that(found == (3, 3), f"trees: {self.name}: a hit that ends inside, {found}")
        most = self.same("a hit that ends inside")
        self._control()
        for count, words in ((3, "xyz"), (2, "pq of the salted"), (6, "the rest of the salted"), (4, "efgh")):
            self.theirs.evict(count)
            self.ours.evict(count)
            self.same(f"evicted {words}")
        self.serve("and back again", of("abcdxyz"), 4)
        self.theirs.evict(len(self.theirs.known().standing))
        self.ours.evict(len(self.ours.known().standing))
        left = self.same("evicted all")
        self.checks.that(left == 0, f"trees: {self.name}: nothing stands")
        return most

    def _control(self) -> None:
        """What only one of them has is seen."""
        self.ours.serve(of("k"))
        unlike = self.theirs.known().unlike(self.ours.known())
        self.checks.that(unlike, f"trees: {self.name}: a page more is seen {unlike}")
        self.theirs.serve(of("k"))
        self.same("and when both have it")


def _random(checks: Checks, name: str, theirs: Theirs, ours: Ours) -> int:
    draw = random.Random(name)
    both, unlike, hits = Both(checks, name, theirs, ours), list[str](), 0
    for _ in range(REQUESTS):
        letters = "".join(draw.choice("ab") for _ in range(draw.randint(1, 7)))
        prompt = of(letters, salt=draw.choice(("", "s")))
        had = theirs.serve(prompt), ours.serve(prompt)
        hits += had[0]
        unlike += [f"hits {had}"] if had[0] != had[1] else []
        unlike += theirs.known().unlike(ours.known())
    checks.that(
        hits and not unlike, f"trees: {name}: {REQUESTS} random prompts, {hits} hits {unlike[:3] or ''}".rstrip()
    )
    return both.same("after them")


def _extra_keys(checks: Checks, tree: str) -> None:
    """A page that stands under two extra_keys is one id: SGLang says it as often as it stands, pdkv once."""
    theirs = Theirs(tree)
    with Ours() as ours:
        for extra in ("", "x", "y"):
            theirs.serve(of("abc", extra=extra))
            ours.serve(of("abc", extra=extra))
        mine = ours.known()
        checks.that(not mine.unlike(theirs.known()), f"trees: {tree}: extra_keys change no id")
        counts = [Counter(known.standing.values()) for known in (theirs.known(), mine)]
        checks.that(counts == [{3: 3}, {1: 3}], f"trees: {tree}: SGLang says an id for each extra_key, pdkv once")


def _namespaces(checks: Checks, tree: str) -> None:
    """Where SGLang's ids depend on more than pdkv's: in the format for Dynamo on the salt in another way, and on the
    extra_key; without it on the name of a LoRA adapter."""
    for words, told, due in (
        ("in SGLang's format for Dynamo", {"dynamo": True}, [False, True, True]),
        ("where an extra_key is a LoRA adapter's", {"adapter": "x"}, [False, False, True]),
    ):
        unlike: list[bool] = []
        for prompt in (of("abc"), of("abc", salt="s"), of("abc", extra="x")):
            theirs = Theirs(tree, **told)
            theirs.serve(prompt)
            with Ours() as ours:
                ours.serve(prompt)
                unlike.append(bool(theirs.known().unlike(ours.known())))
        checks.that(unlike == due, f"trees: {tree}: {words}, ids are others of plain, salted, keyed prompts: {unlike}")
