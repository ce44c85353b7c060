"""The keeper, step by step on a clock of the test's own: each transition, and what must not be one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pdkv.errors import PeerLost, WrongIncarnation
from pdkv.ids import PeerName
from pdkv.node.flow import together
from pdkv.node.keeper import KeeperSettings, PeerKeeper
from pdkv.node.peers import PeerBook, PeerState
from pdkv.transfer.backends.loopback import Fault, FaultKind
from tests.node.scene import turns, until
from tests.node.test_peers import Town, live

SETTINGS = KeeperSettings(probe_s=5.0, retry_s=1.0, lost_s=15.0, forget_s=60.0)


class Kept:
    """A town whose book is kept, by a clock that only the test moves."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.now_s = 1000.0
        self.book = town.book = PeerBook(town.here, lambda: self.now_s)
        self.probed: list[PeerName] = []
        self.keeper = PeerKeeper(self.book, self._probe, SETTINGS)

    async def _probe(self, name: PeerName) -> None:
        self.probed.append(name)
        await self.book.prove(name)

    async def step(self, later_s: float = 0.0) -> None:
        """After `later_s`; returns when the probes that were due have ended."""
        self.now_s += later_s
        async with together() as group:
            self.keeper.step(group)

    def state(self, name: PeerName) -> PeerState | None:
        return self.book.states.get(name)


def kept(scenario: Callable[[Kept], Awaitable[None]], **settings: float) -> None:
    live(lambda town: scenario(Kept(town)), **settings)


def test_a_peer_is_probed_only_when_nothing_was_heard_of_it() -> None:
    async def scenario(kept: Kept) -> None:
        peer = kept.town.life("p")
        await kept.book.admit(peer.intro())
        await kept.step(4.9)
        assert kept.probed == []
        kept.book.check(peer.envelope(kept.town.here.name))
        await kept.step(4.9)
        assert kept.probed == [], "it has just spoken"
        await kept.step(0.1)
        assert kept.probed == [peer.name]
        await kept.step(4.9)
        assert kept.probed == [peer.name], "a probe that ended well is a sign of life"
        assert kept.state(peer.name) is PeerState.READY

    kept(scenario)


def test_a_peer_that_dies_is_suspect_then_lost_then_forgotten() -> None:
    async def scenario(kept: Kept) -> None:
        peer, town = kept.town.life("p"), kept.town
        await kept.book.admit(peer.intro())
        town.net.kill(peer.name)
        await kept.step(5.0)
        seen = town.book.status("decode", town.here.manager, leases=0, requests=0).peers[str(peer.name)]
        assert (seen.state, seen.since_s) == ("SUSPECT", 0.0)
        assert seen.error.startswith("PeerLost: ")
        for _ in range(14):
            await kept.step(1.0)
        assert kept.state(peer.name) is PeerState.SUSPECT
        assert len(kept.probed) == 15, "one a second"
        await kept.step(1.0)
        assert kept.state(peer.name) is PeerState.LOST
        while kept.now_s < 1079.0:
            await kept.step(1.0)
        assert kept.state(peer.name) is PeerState.LOST
        await kept.step(1.0)
        core = town.here.transfer._core  # type: ignore[attr-defined]
        await until(lambda: not core.peers)
        await until(lambda: kept.state(peer.name) is None)
        with pytest.raises(WrongIncarnation):
            kept.book.check(peer.envelope(town.here.name))
        probes = len(kept.probed)
        await kept.step(100.0)
        assert len(kept.probed) == probes

    kept(scenario)


@pytest.mark.parametrize("after_s", [3.0, 30.0])
def test_a_peer_that_comes_back_in_the_same_life_is_ready_again(after_s: float) -> None:
    """From SUSPECT, and from LOST: nobody is shut out for ever, and nobody has to ask for it."""

    async def scenario(kept: Kept) -> None:
        peer, town = kept.town.life("p"), kept.town
        await kept.book.admit(peer.intro())
        town.net.kill(peer.name)
        await kept.step(5.0)
        for _ in range(int(after_s)):
            await kept.step(1.0)
        assert kept.state(peer.name) is (PeerState.SUSPECT if after_s < 15 else PeerState.LOST)
        town.net._agents.add(str(peer.name))
        await kept.step(5.0)
        assert kept.state(peer.name) is PeerState.READY
        assert (
            kept.book.status("decode", kept.town.here.manager, leases=0, requests=0)
            .peers[str(peer.name)]
            .error.startswith("PeerLost: ")
        )

    kept(scenario)


def test_a_failed_request_makes_the_next_probe_due_at_once() -> None:
    async def scenario(kept: Kept) -> None:
        peer = kept.town.life("p")
        await kept.book.admit(peer.intro())
        kept.book.mark(peer.name, PeerState.SUSPECT, "PeerLost: the stream broke")
        assert kept.keeper.changed.is_set()
        assert kept.book.get(peer.name).error == "PeerLost: the stream broke"  # type: ignore[union-attr]
        await kept.step()
        assert kept.state(peer.name) is PeerState.READY

    kept(scenario)


def test_one_probe_at_a_time_and_a_peer_that_hangs_holds_up_no_other() -> None:
    async def scenario(kept: Kept) -> None:
        hangs, fine = kept.town.life("h"), kept.town.life("f")
        for peer in (hangs, fine):
            await kept.book.admit(peer.intro())
        kept.town.net.script(hangs.name, *[Fault(FaultKind.HANG)] * 9)
        async with together() as group:
            for _ in range(4):
                kept.now_s += 5.0
                kept.keeper.step(group)
                await until(lambda: kept.keeper._under_way == {hangs.name})
            assert kept.probed.count(hangs.name) == 1
            assert kept.probed.count(fine.name) == 4
            kept.town.net.settle(hangs.name)
        assert kept.state(hangs.name) is PeerState.READY

    kept(scenario)


def test_a_lost_peer_that_speaks_is_not_forgotten() -> None:
    async def scenario(kept: Kept) -> None:
        peer = kept.town.life("p")
        await kept.book.admit(peer.intro())
        kept.book.mark(peer.name, PeerState.LOST, "a wall in one direction")
        kept.town.net.kill(peer.name)
        for _ in range(10):
            await kept.step(20.0)
            kept.book.check(peer.envelope(kept.town.here.name))
        assert kept.state(peer.name) is PeerState.LOST
        await kept.step(60.0)
        await until(lambda: kept.state(peer.name) is None)

    kept(scenario)


def test_a_peer_that_is_reached_just_then_is_not_forgotten() -> None:
    async def scenario(kept: Kept) -> None:
        peer, town = kept.town.life("p"), kept.town
        await kept.book.admit(peer.intro())
        kept.book.mark(peer.name, PeerState.LOST)
        town.net.script(peer.name, Fault(FaultKind.HANG))
        reaching = asyncio.create_task(kept.book.admit(peer.intro()))
        await until(lambda: town.here.transfer._core.reading)  # type: ignore[attr-defined]
        forgetting = asyncio.create_task(kept.book.forget(peer.name, "forgotten"))
        await turns()
        assert not forgetting.done(), "one thing at a time happens to a peer"
        town.net.settle(peer.name)
        await asyncio.gather(reaching, forgetting)
        assert kept.state(peer.name) is PeerState.READY
        assert set(town.here.transfer._core.peers) == {peer.name}  # type: ignore[attr-defined]

    kept(scenario)


def test_a_forgotten_peer_keeps_its_entry_until_its_last_read_has_settled_and_may_come_back_meanwhile() -> None:
    async def scenario(kept: Kept) -> None:
        peer, town = kept.town.life("p"), kept.town
        core = town.here.transfer._core  # type: ignore[attr-defined]
        await kept.book.admit(peer.intro())
        town.net.script(peer.name, Fault(FaultKind.HANG))
        hanging = town.here.transfer.probe(peer.name)
        await until(lambda: core.reading)
        kept.book.mark(peer.name, PeerState.LOST)
        await kept.book.forget(peer.name, "forgotten")
        await turns()
        assert kept.state(peer.name) is PeerState.LOST
        assert list(kept.book) == [], "no message of it is taken any more"
        with pytest.raises(PeerLost):
            await kept.book.admit(peer.intro())
        town.net.settle(peer.name)
        await asyncio.wrap_future(hanging)
        await until(lambda: kept.state(peer.name) is None)
        await kept.book.admit(peer.intro())
        await turns()
        assert kept.state(peer.name) is PeerState.READY
        assert set(core.peers) == {peer.name}

    kept(scenario)


# --- readiness --------------------------------------------------------------------------------------------------------


def test_a_node_is_unready_only_while_it_reaches_none_of_its_peers() -> None:
    async def scenario(kept: Kept) -> None:
        readiness = kept.town.here.readiness
        assert readiness.unready == "", "no peers yet"
        first, second = kept.town.life("p"), kept.town.life("q")
        for peer in (first, second):
            await kept.book.admit(peer.intro())
        kept.town.net.kill(first.name)
        await kept.step(5.0)
        assert readiness.unready == "", "one dead peer"
        kept.book.mark(second.name, PeerState.SUSPECT, "a call failed")
        assert readiness.unready == "", "nothing proves yet that it can't be reached"
        kept.town.net.kill(second.name)
        await kept.step(1.0)
        assert readiness.unready.startswith("no peer of 2 can be reached: ")
        assert str(first.name) in readiness.unready
        assert kept.book.status("decode", kept.town.here.manager, leases=0, requests=0).unready == readiness.unready
        kept.town.net._agents.add(str(second.name))
        await kept.step(1.0)
        assert readiness.unready == ""

    kept(scenario)


def test_a_node_whose_last_peer_was_forgotten_is_as_a_new_one() -> None:
    async def scenario(kept: Kept) -> None:
        readiness = kept.town.here.readiness
        peer = kept.town.life("p")
        await kept.book.admit(peer.intro())
        kept.town.net.kill(peer.name)
        await kept.step(5.0)
        assert readiness.unready
        await kept.step(15.0)
        assert readiness.unready
        await kept.step(60.0)
        assert readiness.unready == ""
        await until(lambda: not kept.book.states)

    kept(scenario)
