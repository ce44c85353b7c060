"""Holds by themselves: what is sealed, shared, lent and let go."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import torch

from pdkv.adapters.vllm.holds import Holds, Listeners, Terms
from pdkv.adapters.vllm.memory import engine_pool
from pdkv.errors import IntegrityError, StalePages
from pdkv.ids import LocalPages, NodeId, PageHashes, PeerName, new_incarnation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.adapters.vllm.engines import BLOCKS, TOKENS, layers

ME, YOU = (PeerName(NodeId(name), new_incarnation()) for name in ("me", "you"))


@dataclass
class Kept:
    holds: Holds
    pool: SlotPool
    ended: list[str] = field(default_factory=list)
    lent: list[bool] = field(default_factory=list)

    def generation(self, page: int) -> int:
        return int(self.pool.table.generations(pages(page))[0])

    def sealed(self, page: int) -> bool:
        return bool(self.pool.table.sealed(pages(page))[0])


def pages(*ids: int) -> LocalPages:
    return LocalPages.checked(ids, BLOCKS)


def named(text: str) -> PageHashes:
    """One name a letter; the chain of "ab" begins as that of "a"."""
    return PageHashes(b"".join(bytes([ord(letter)]) * 32 for letter in text))


def kept(scenario: Callable[[Kept], Awaitable[None]], terms: Terms = Terms(60.0, 60.0, 0.1)) -> None:  # noqa: B008
    async def main() -> None:
        pool, ended, lent = engine_pool(layers(), BLOCKS, TOKENS), list[str](), list[bool]()
        holds = Holds(Verifier(pool), ME, terms, Listeners(ended.append, lent.append))
        watch = asyncio.create_task(holds.watch())
        try:
            async with asyncio.timeout(20):
                await scenario(Kept(holds, pool, ended, lent))
        finally:
            watch.cancel()
            holds.digests.close()

    asyncio.run(main())


def test_a_hold_is_named_while_it_lasts_and_void_afterwards() -> None:
    async def scenario(kept: Kept) -> None:
        before = kept.generation(3)
        await kept.holds.add("r", pages(3, 5), named("ab"))
        assert kept.sealed(3)
        lease, lent = await kept.holds.lend(named("ab"), 1, YOU)
        assert (lent.page_ids.tolist(), lent.hashes, lent.first_index) == ([5], named("b"), 1)
        kept.holds.release(lease, ME)
        assert kept.lent == [True], "not its lease"
        kept.holds.release(lease, YOU)
        kept.holds.release(lease, YOU)
        assert (kept.ended, len(kept.holds), kept.lent) == (["r"], 0, [True, False])
        assert not kept.sealed(3)
        assert kept.generation(3) == (before + 1) % 2**64, "a late reader sees that it is void"

    kept(scenario)


def test_what_two_prompts_share_stays_named_until_both_are_over() -> None:
    async def scenario(kept: Kept) -> None:
        await kept.holds.add("one", pages(3, 5), named("ab"))
        await kept.holds.add("two", pages(3, 6), named("ac"))
        one, _ = await kept.holds.lend(named("ab"), 0, YOU)
        two, lent = await kept.holds.lend(named("ac"), 0, YOU)
        kept.holds.release(one, YOU)
        assert (kept.sealed(3), kept.sealed(5), kept.ended) == (True, False, ["one"])
        assert lent.generations[0] == kept.generation(3)
        assert kept.lent == [True], "somebody reads"
        kept.holds.release(two, YOU)
        assert not kept.sealed(3)
        assert kept.lent == [True, False]

    kept(scenario)


def test_the_same_prompt_computed_twice_is_lent_to_two_readers() -> None:
    async def scenario(kept: Kept) -> None:
        for request, block in (("one", 3), ("two", 5)):
            await kept.holds.add(request, pages(block), named("a"))
        lent = [await kept.holds.lend(named("a"), 0, YOU) for _ in range(2)]
        assert {int(columns.page_ids[0]) for _, columns in lent} == {3, 5}
        third, columns = await kept.holds.lend(named("a"), 0, YOU)
        for lease, _ in lent:
            kept.holds.release(lease, YOU)
        assert len(kept.ended) == 1, "the one with a second reader stays"
        assert kept.sealed(int(columns.page_ids[0]))
        kept.holds.release(third, YOU)
        assert sorted(kept.ended) == ["one", "two"]

    kept(scenario)


def test_a_block_under_two_names_is_not_lent() -> None:
    async def scenario(kept: Kept) -> None:
        await kept.holds.add("one", pages(3), named("a"))
        with pytest.raises(IntegrityError, match="two names"):
            await kept.holds.add("two", pages(3), named("b"))
        assert kept.ended == ["two"], "the engine has its blocks back"
        with pytest.raises(StalePages, match="two names"):
            await kept.holds.lend(named("b"), 0, YOU)
        assert kept.holds.has(named("a"))
        assert not kept.holds.has(named("b"))

    kept(scenario)


def test_a_prompt_is_waited_for() -> None:
    async def scenario(kept: Kept) -> None:
        waiting = asyncio.create_task(kept.holds.lend(named("a"), 0, YOU))
        await asyncio.sleep(0)
        await kept.holds.add("r", pages(3), named("a"))
        assert (await waiting)[1].hashes == named("a")

    kept(scenario, Terms(60.0, 60.0, 60.0))


def test_a_prompt_that_doesnt_come_is_missed() -> None:
    async def scenario(kept: Kept) -> None:
        await kept.holds.add("r", pages(3), named("a"))
        for other in ("b", "ba"):  # the last page of the second is there, after another one
            with pytest.raises(StalePages, match="not here"):
                await kept.holds.lend(named(other), 0, YOU)

    kept(scenario)


@pytest.mark.parametrize("read", [False, True])
def test_a_hold_ends_by_itself_with_and_without_a_reader(read: bool) -> None:
    async def scenario(kept: Kept) -> None:
        await kept.holds.add("r", pages(3), named("a"))
        if read:
            await kept.holds.lend(named("a"), 0, YOU)
        while not kept.ended:
            await asyncio.sleep(0)
        assert not kept.sealed(3)
        assert kept.lent == ([True, False] if read else [])

    kept(scenario, Terms(60.0, 0.05, 20.0) if read else Terms(0.05, 60.0, 0.1))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), ValueError("a bug"), MemoryError()])
def test_what_cant_be_sealed_is_given_back_and_its_reader_is_told_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(self: Verifier, *args: object) -> object:
        raise error

    async def scenario(kept: Kept) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(Verifier, "seal", failing)
            with pytest.raises(type(error)):
                await kept.holds.add("r", pages(3), named("a"))
        assert (kept.ended, len(kept.holds), kept.sealed(3)) == (["r"], 0, False)
        with pytest.raises(StalePages, match=type(error).__name__):
            await kept.holds.lend(named("a"), 0, YOU)
        adding = asyncio.create_task(kept.holds.add("again", pages(5), named("a")))
        await asyncio.sleep(0)
        assert not kept.sealed(5)
        lease, lent = await kept.holds.lend(named("a"), 0, YOU)
        assert lent.page_ids.tolist() == [5], "what was computed again is waited for"
        await adding
        kept.holds.release(lease, YOU)
        assert kept.ended == ["r", "again"]

    kept(scenario, Terms(60.0, 60.0, 20.0))


def test_why_it_couldnt_be_sealed_is_forgotten_in_time() -> None:
    async def scenario(kept: Kept) -> None:
        await kept.holds.add("one", pages(3), named("b"))
        with pytest.raises(IntegrityError):
            await kept.holds.add("two", pages(3), named("a"))
        said = "two names"
        while "two names" in said:
            await asyncio.sleep(0)
            with pytest.raises(StalePages) as told:
                await kept.holds.lend(named("a"), 0, YOU)
            said = str(told.value)
        assert "not here" in said
        assert kept.ended == ["two", "one"], "each once"

    kept(scenario, Terms(0.05, 60.0, 0.1))
