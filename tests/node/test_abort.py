"""A request given up at every stage of its life, on both sides: no page gets away from who still writes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from pdkv.errors import DeadlineExceeded, PeerLost
from pdkv.node import flow
from pdkv.node.messages import Accepted, NodeIntro, PagesSealed, PrefillDone, PrefillEvent, PrefillRequest
from tests.node.scene import Gate, Meddler, answers, gated, held, recovered, request, run, turns, until
from tests.node.toy import Pair, make_pair

# A prompt of 300 tokens: steps [0, 128), [128, 256), [256, 300); three announcements (2 pages, 2 pages, the tail).
STEPS = 3
THREADS: dict[str, Callable[[Pair], Gate]] = {
    "first chunk": lambda p: gated(p.prefill.parts.engine, "forward", at=1),
    "between chunks": lambda p: gated(p.prefill.parts.engine, "forward", at=2),
    "last chunk": lambda p: gated(p.prefill.parts.engine, "forward", at=STEPS),
    "sealing": lambda p: gated(p.prefill.parts.verifier, "seal", at=1),
    "zeroing the tail": lambda p: gated(p.prefill.parts.pool, "zero_tail"),
    "sealing the tail": lambda p: gated(p.prefill.parts.verifier, "seal", at=3),
    "verifying": lambda p: gated(p.decode.parts.verifier, "verify", at=1),
    "verifying the last": lambda p: gated(p.decode.parts.verifier, "verify", at=3),
    "first decode step": lambda p: gated(p.decode.parts.engine, "forward", at=1),
    "later decode step": lambda p: gated(p.decode.parts.engine, "forward", at=4),
}
"""Where a thread is when the client goes: something runs there that nobody can stop."""


async def gone_while_held(pair: Pair, gate: Gate) -> None:
    """The client goes while a thread is held; what that thread may touch stays reserved until it has ended."""
    asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
    await gate.reached()
    await turns()
    before = [held(node) for node in pair.nodes]
    asking.cancel()
    await turns()
    try:
        assert not asking.done()
        assert max(before) > 0
        assert any(b > 0 and held(node) >= b for node, b in zip(pair.nodes, before, strict=True))
    finally:
        gate.open()
        await asyncio.wait([asking])
    assert asking.cancelled()


@pytest.mark.parametrize("where", THREADS)
def test_a_running_step_keeps_its_pages_until_it_has_ended(where: str) -> None:
    async def scenario(pair: Pair) -> None:
        await gone_while_held(pair, THREADS[where](pair))
        await recovered(pair)

    run(scenario, make_pair())


def test_a_step_that_is_abandoned_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a worker that doesn't wait gives the pages away under the step."""

    async def abandon(future: object) -> None:
        return None

    async def scenario(pair: Pair) -> None:
        gate = THREADS["between chunks"](pair)
        monkeypatch.setattr(flow, "settle", abandon)
        with pytest.raises(AssertionError):
            await gone_while_held(pair, gate)
        monkeypatch.undo()

    run(scenario, make_pair(), tidy=False)


# --- waiting for the other side ---------------------------------------------------------------------------------------


class Halting(Meddler):
    """Says nothing more once `stops` would be said for the `at`-th time."""

    def __init__(self, pair: Pair, stops: type, at: int = 1) -> None:
        super().__init__(pair, lambda event: [event])
        self._stops = stops
        self._left = at
        self.halted = asyncio.Event()

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        async with aclosing(super().prefill(request)) as events:
            async for event in events:
                self._left -= isinstance(event, self._stops)
                if not self._left:
                    self.halted.set()
                    await asyncio.Event().wait()
                yield event


class Silent(Meddler):
    """Doesn't answer a connect until it is given up: dialling goes on to its own end, whoever waits for it."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair, lambda event: [event])
        self.halted = asyncio.Event()
        self.over = asyncio.Event()
        self.connect = self._connect  # type: ignore[method-assign]

    async def _connect(self, intro: NodeIntro) -> NodeIntro:
        self.halted.set()
        await self.over.wait()
        raise PeerLost("no answer")


WAITS: dict[str, Callable[[Pair], Halting | Silent]] = {
    "connect": Silent,
    "Accepted": lambda p: Halting(p, Accepted),
    "first pages": lambda p: Halting(p, PagesSealed),
    "more pages": lambda p: Halting(p, PagesSealed, at=2),
    "PrefillDone": lambda p: Halting(p, PrefillDone),
}


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("how", ["gone", "deadline"])
def test_a_wait_for_a_silent_peer_ends(where: str, how: str) -> None:
    async def scenario(pair: Pair) -> None:
        peer = pair.directory.peers["p0"] = WAITS[where](pair)
        asked = request(300) if how == "gone" else request(300, remaining_s=0.2)
        asking = asyncio.create_task(answers(pair.decode.generate(asked)))
        if how == "gone":
            await asyncio.wait_for(peer.halted.wait(), 10)
            asking.cancel()
        await asyncio.wait([asking])
        if how == "gone":
            assert asking.cancelled()
        else:
            assert isinstance(asking.exception(), DeadlineExceeded)
        if isinstance(peer, Silent):
            peer.over.set()
            await until(lambda: not pair.decode.links._dialling)
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair())


def test_a_client_that_goes_between_tokens_frees_everything() -> None:
    async def scenario(pair: Pair) -> None:
        stream = pair.decode.generate(request(300))
        await anext(stream)
        await stream.aclose()
        await recovered(pair)

    run(scenario, make_pair())


def test_a_stream_that_nobody_begins_takes_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.generate(request(300)).aclose()
        await recovered(pair)

    run(scenario, make_pair())


def test_an_aborted_id_may_come_again_while_prefill_still_ends_it() -> None:
    """Prefill knows decode's own ids, new for each request."""

    async def scenario(pair: Pair) -> None:
        seen: list[str] = []

        def listen(asked: PrefillRequest) -> None:
            seen.append(asked.request_id)

        pair.directory.peers["p0"] = Listener(pair, listen)  # type: ignore[assignment]
        await answers(pair.decode.generate(request(100)))
        await answers(pair.decode.generate(request(100)))
        assert len(set(seen)) == 2

    run(scenario, make_pair())


class Listener:
    """The prefill node, and somebody who hears what it is asked."""

    def __init__(self, pair: Pair, hear: Callable[[PrefillRequest], None]) -> None:
        self._node, self._hear = pair.prefill, hear
        self.connect = pair.prefill.connect
        self.renew_lease = pair.prefill.renew_lease
        self.release_lease = pair.prefill.release_lease

    def prefill(self, asked: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        self._hear(asked)
        return self._node.prefill(asked)
