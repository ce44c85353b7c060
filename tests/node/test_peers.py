"""The book of peers: who is let in, in which life, and that it doesn't grow with the lives of a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from pdkv.contract import ContractFacts
from pdkv.errors import ContractMismatch, DeadlineExceeded, PeerLost, ProtocolError, TransferError, WrongIncarnation
from pdkv.ids import PeerName
from pdkv.node.base import NodeParts
from pdkv.node.messages import NodeIntro
from pdkv.node.peers import PeerBook, PeerState
from pdkv.transfer.backends.loopback import Fault, FaultKind, LoopbackNet
from pdkv.transfer.orders import TransferSettings
from tests.node.scene import turns, until
from tests.node.toy import make_parts

FACTS = ContractFacts(weights_id="toy")


class Town:
    """One node with a book, and as many lives of others as a test wants."""

    def __init__(self, settings: TransferSettings) -> None:
        self.net = LoopbackNet()
        self.settings = settings
        self.lives: list[NodeParts] = []
        self.here = self.life("here")
        self.book = PeerBook(self.here)
        self.added: list[PeerName] = []
        original = self.here.transfer.add_peer

        def add_peer(peer: PeerName, *rest: Any) -> Future[None]:
            self.added.append(peer)
            return original(peer, *rest)

        self.here.transfer.add_peer = add_peer  # type: ignore[method-assign]

    def life(self, name: str, facts: ContractFacts = FACTS) -> NodeParts:
        self.lives.append(make_parts(name, facts, self.net, pages=4, settings=self.settings))
        return self.lives[-1]

    def close(self) -> None:
        for life in self.lives:
            life.close()


def live(scenario: Callable[[Town], Any], **settings: float) -> None:
    async def main() -> None:
        town = Town(TransferSettings(**settings))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await scenario(town)
        finally:
            town.close()

    asyncio.run(main())


def test_a_peer_is_let_in_once_however_often_it_comes_at_once() -> None:
    async def scenario(town: Town) -> None:
        peer = town.life("p")
        await asyncio.gather(*(town.book.admit(peer.intro()) for _ in range(5)))
        assert town.added == [peer.name]
        assert town.book.states == {peer.name: PeerState.READY}
        assert town.book.intro(peer.name) == peer.intro()
        assert len(town.book._locks) == 0
        status = town.book.status("prefill", town.here.manager, leases=2, requests=3)
        assert (status.role, status.leases, status.requests, status.backend) == ("prefill", 2, 3, "loopback")
        (seen,) = status.peers.values()
        assert (list(status.peers), seen.state, seen.lane) == ([str(peer.name)], "READY", "loopback")
        assert status.pages["total"] == 3

    live(scenario)


def changed(intro: NodeIntro, **fields: Any) -> NodeIntro:
    return replace(intro, **fields)


REFUSED: dict[str, tuple[Callable[[NodeIntro], NodeIntro], type[Exception], str]] = {
    "cut metadata": (lambda i: changed(i, agent_metadata=i.agent_metadata[:-1]), ProtocolError, "damaged"),
    "another's checksum": (lambda i: changed(i, metadata_checksum=1), ProtocolError, "damaged"),
    "other weights": (
        lambda i: changed(i, contract=replace(i.contract, weights_id="b", rollback_tokens=4)),
        ContractMismatch,
        "weights_id: mine toy, theirs b .*rollback_tokens: mine 0, theirs 4",
    ),
    "other segments": (
        lambda i: changed(i, pool=replace(i.pool, segments=i.pool.segments[:-1])),
        ContractMismatch,
        "segment",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_who_is_refused_leaves_no_way_in(what: str) -> None:
    change, kind, words = REFUSED[what]

    async def scenario(town: Town) -> None:
        peer = town.life("p")
        with pytest.raises(kind, match=words):
            await town.book.admit(change(peer.intro()))
        with pytest.raises(WrongIncarnation):
            town.book.check(peer.envelope(town.here.name))
        await town.book.admit(peer.intro())
        town.book.check(peer.envelope(town.here.name))

    live(scenario)


def test_one_life_has_one_introduction() -> None:
    async def scenario(town: Town) -> None:
        peer = town.life("p")
        await town.book.admit(peer.intro())
        other = changed(peer.intro(), contract=replace(peer.contract, host="elsewhere"))
        with pytest.raises(ProtocolError, match="otherwise before"):
            await town.book.admit(other)
        assert town.book.intro(peer.name) == peer.intro()

    live(scenario)


def test_a_message_is_for_this_life_from_a_known_one_about_equal_pages() -> None:
    async def scenario(town: Town) -> None:
        peer = town.life("p")
        await town.book.admit(peer.intro())
        right = peer.envelope(town.here.name)
        town.book.check(right)
        for wrong, kind in (
            (replace(right, receiver=peer.name), WrongIncarnation),
            (replace(right, sender=town.here.name), WrongIncarnation),
            (replace(right, content_fingerprint=b""), ContractMismatch),
        ):
            with pytest.raises(kind):
                town.book.check(wrong)

    live(scenario)


# --- lives of one node ------------------------------------------------------------------------------------------------


def test_a_new_life_takes_the_place_of_one_that_is_silent() -> None:
    async def scenario(town: Town) -> None:
        for _ in range(5):
            peer = town.life("p")
            await town.book.admit(peer.intro())
            assert [known.name for known in town.book] == [peer.name]
            peer.transfer.close()
        await until(lambda: len(town.book.states) == 1)
        core = town.here.transfer._core  # type: ignore[attr-defined]
        await until(lambda: len(core.peers) == 1)
        with pytest.raises(WrongIncarnation):
            town.book.check(town.lives[1].envelope(town.here.name))
        town.book.check(town.lives[-1].envelope(town.here.name))

    live(scenario)


def test_two_lives_that_both_answer_are_two_nodes_of_one_name() -> None:
    async def scenario(town: Town) -> None:
        first, second = town.life("p"), town.life("p")
        await town.book.admit(first.intro())
        with pytest.raises(ProtocolError, match=f"{second.name} can't take the place of {first.name}"):
            await town.book.admit(second.intro())
        town.book.check(first.envelope(town.here.name))
        assert town.book.states == {first.name: PeerState.READY}
        first.transfer.close()
        await town.book.admit(second.intro())
        await until(lambda: town.book.states == {second.name: PeerState.READY})

    live(scenario)


def test_an_old_life_that_hangs_holds_the_new_one_up_for_a_probe_and_keeps_its_reads() -> None:
    async def scenario(town: Town) -> None:
        first, second = town.life("p"), town.life("p")
        await town.book.admit(first.intro())
        town.net.script(first.name, Fault(FaultKind.HANG))
        await town.book.admit(second.intro())
        assert [known.name for known in town.book] == [second.name]
        core = town.here.transfer._core  # type: ignore[attr-defined]
        await turns()
        assert set(core.peers) == set(town.book.states) == {first.name, second.name}
        seen = town.book.status("decode", town.here.manager, leases=0, requests=0).peers[str(first.name)]
        assert (seen.state, seen.error) == ("LOST", f"{second.name} took its place")
        town.net.settle(first.name)
        await until(lambda: set(core.peers) == {second.name})
        await until(lambda: set(town.book.states) == {second.name})

    live(scenario, probe_s=0.3)


@pytest.mark.parametrize(("fault", "kind"), [(FaultKind.FAIL, TransferError), (FaultKind.HANG, DeadlineExceeded)])
def test_a_peer_whose_first_read_fails_may_try_again(fault: FaultKind, kind: type[Exception]) -> None:
    async def scenario(town: Town) -> None:
        peer = town.life("p")
        town.net.script(peer.name, Fault(fault))
        with pytest.raises(kind):
            await town.book.admit(peer.intro())
        assert town.book.states == {}, "who never got in leaves nothing: names are free to make up"
        town.net.settle(peer.name)
        core = town.here.transfer._core  # type: ignore[attr-defined]
        await until(lambda: not core.peers)
        await town.book.admit(peer.intro())
        assert town.book.states == {peer.name: PeerState.READY}

    live(scenario, connect_s=1.0)


def test_a_peer_under_suspicion_is_added_again_and_one_that_is_gone_stays_gone() -> None:
    async def scenario(town: Town) -> None:
        peer = town.life("p")
        town.book.mark(peer.name, PeerState.SUSPECT)
        assert not town.book.states
        await town.book.admit(peer.intro())
        town.book.mark(peer.name, PeerState.SUSPECT)
        town.net.kill(peer.name)
        with pytest.raises(PeerLost):
            await asyncio.wrap_future(town.here.transfer.probe(peer.name))
        with pytest.raises(PeerLost):
            await town.book.admit(peer.intro())
        town.net._agents.add(str(peer.name))
        await town.book.admit(peer.intro())
        assert town.book.states == {peer.name: PeerState.READY}

    live(scenario)


def test_nothing_is_kept_of_nodes_that_never_got_in() -> None:
    async def scenario(town: Town) -> None:
        for i in range(5):
            stranger = town.life(f"s{i}", replace(FACTS, weights_id="other"))
            with pytest.raises(ContractMismatch):
                await town.book.admit(stranger.intro())
        assert (len(town.book.states), len(town.book._peers), len(town.book._locks)) == (0, 0, 0)

    live(scenario)


def test_an_introduction_that_nothing_stands_behind_pushes_nobody_out() -> None:
    """The old incarnation doesn't answer for a moment; the one that claims its name can't be reached at all."""

    async def scenario(town: Town) -> None:
        first, second = town.life("p"), town.life("p")
        await town.book.admit(first.intro())
        town.net.script(first.name, Fault(FaultKind.HANG))
        town.net.script(second.name, Fault(FaultKind.FAIL))
        with pytest.raises(TransferError):
            await town.book.admit(second.intro())
        assert town.book.states == {first.name: PeerState.READY}
        assert town.book.intro(first.name)
        town.net.settle(first.name)

    live(scenario, probe_s=0.3)


def test_the_status_says_what_became_of_the_pools_memory() -> None:
    async def body(town: Town) -> None:
        memory = town.book.status("prefill", town.here.manager, leases=0, requests=0).memory
        pool = town.here.pool
        assert memory["kind"] == f"{sum(pool.memory.buffer_bytes):,} B, {pool.memory.kind}"
        assert memory["registered"] == str(town.here.transfer.status().registration)
        assert memory["registered"].startswith(f"{sum(pool.memory.buffer_bytes):,} B as 1 region in ")

    live(body)
