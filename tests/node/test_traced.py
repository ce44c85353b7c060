"""What a trace is told of a request's attempts, of what each of them read, and of the leases that it read under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdkv.errors import PeerLost
from pdkv.node.attempts import ATTEMPT
from pdkv.node.messages import FailurePolicy
from pdkv.node.prefill import COMPUTE
from pdkv.node.source import LEASE
from pdkv.node.stages import Stage
from pdkv.node.traced import TRANSFER
from pdkv.tracing.span import within
from tests.node.scene import answers, request
from tests.node.trio import LENGTH, Trio, fallible, play
from tests.tracing.test_span import Told


def found(root: Told, name: str) -> list[Told]:
    """In the order in which they began; both nodes are in one process here, so under one root."""

    def walk(of: Told) -> Iterator[Told]:
        for child in of.children:
            yield child
            yield from walk(child)

    return [each for each in walk(root) if each.name == name]


def where(transfer: Told) -> object:
    return transfer.facts["pdkv.peer"]


def test_an_attempt_is_told_with_what_it_read() -> None:
    async def scenario(trio: Trio) -> None:
        root = Told("root")
        with within(root):
            _, done = await answers(trio.decode.generate(fallible(None)))
        await trio.rested()
        (attempt,) = root.children
        assert (attempt.name, attempt.facts) == (ATTEMPT, {"pdkv.prefill.address": "p0"})
        (transfer,) = found(attempt, TRANSFER)
        facts = transfer.facts
        shipment = done.shipment
        assert facts["pdkv.transfer.pages"] == shipment.pages_shipped == 5
        assert facts["pdkv.transfer.main_bytes"] == shipment.bytes_main
        assert facts["pdkv.transfer.index_bytes"] == shipment.bytes_index
        assert facts["pdkv.transfer.digests_verified"] == shipment.digests_verified
        assert facts["pdkv.transfer.busy_s"] == pytest.approx(shipment.transfer_s)
        assert facts["pdkv.peer"] == str(trio.wires[0].node.parts.name)
        assert facts["pdkv.transfer.lane"] == "loopback"
        assert facts["began_s"] < facts["ended_s"]  # type: ignore[operator]
        (compute,) = found(attempt, COMPUTE)
        assert compute.facts == {"pdkv.chunks": 3, "pdkv.tokens": LENGTH}
        (lease,) = found(attempt, LEASE)
        assert lease.facts["pdkv.peer"] == str(trio.decode.parts.name)
        assert [each.ended for each in (attempt, compute, lease)] == [1, 1, 1]
        assert "pdkv.lease.expired" not in lease.facts

    play(scenario)


def test_what_another_node_is_asked_for_is_an_attempt_of_its_own() -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        root = Told("root")
        with within(root):
            _, done = await answers(trio.decode.generate(fallible(FailurePolicy.RETRY)))
        await trio.rested()
        assert done.retries == 1
        first, second = found(root, ATTEMPT)
        assert first.facts == {"pdkv.prefill.address": "p0", "pdkv.accepted": True}
        assert [type(error) for error in first.failures] == [PeerLost]
        assert second.facts == {"pdkv.prefill.address": "p1"}
        assert second.failures == []
        own = str(trio.decode.parts.name)
        read = [
            [transfer.facts["pdkv.transfer.pages"] for transfer in found(attempt, TRANSFER) if where(transfer) != own]
            for attempt in (first, second)
        ]
        assert read == [[2], [3]]
        (back,) = [transfer for transfer in found(second, TRANSFER) if where(transfer) == own]
        assert back.facts["pdkv.transfer.pages"] == done.shipment.pages_pulled_back == 2

    play(scenario)


def test_a_request_that_needs_nothing_reads_nothing() -> None:
    async def scenario(trio: Trio) -> None:
        root = Told("root")
        asked = request(129, prefill_address="p0")
        await answers(trio.decode.generate(asked))
        with within(root):
            await answers(trio.decode.generate(request(129, prefill_address="p0", name="again")))
        await trio.rested()
        (transfer,) = found(root, TRANSFER)
        assert transfer.facts["pdkv.transfer.pages"] == 1, "the tail, which is nobody's cache"

    play(scenario)


def test_an_attempt_that_fails_at_all_is_told_with_its_error() -> None:
    async def scenario(trio: Trio) -> None:
        root = Told("root")
        trio.on(Stage.ACCEPTED, trio.wires[0].die)
        with within(root), pytest.raises(PeerLost):
            await answers(trio.decode.generate(fallible(FailurePolicy.FAIL)))
        await trio.rested()
        (attempt,) = found(root, ATTEMPT)
        assert [type(error) for error in attempt.failures] == [PeerLost]
        (lease,) = found(root, LEASE)
        assert lease.ended == 1

    play(scenario)
