"""The router over scripted decode nodes, and once over real sockets."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from pdkv.errors import (
    AccountMismatch,
    AddressRefused,
    BoundsError,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Difference,
    Draining,
    LaneRefused,
    NeverFits,
    NotAPrefillNode,
    PdkvError,
    PeerLost,
    ProtocolError,
    RemoteError,
    StalePages,
    TransferError,
)
from pdkv.ids import RequestId
from pdkv.node.messages import GenerateEvent, GenerateRequest, NodeStatus
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.registry import Registry
from pdkv.router.service import Router
from tests.node.scene import turns
from tests.router.fleet import Clock, learn, node, registry
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, Stream, collect, failure, run, serving, soon

DONE = [samples.TOKEN, samples.GENERATE_DONE]
MISMATCH = [Difference("index_topk", "64", "32", "content: equal")]


def at(error: PdkvError, address: str) -> PdkvError:
    """As the error looks when it comes from the node at `address`."""
    error.fields = {**error.fields, "address": address}
    return error


class Nodes:
    """`NodeDirectory` over scripts, one a (decode, prefill) pair; those without one serve."""

    def __init__(self, **scripts: Stream) -> None:
        self.scripts = scripts
        self.asked: list[tuple[str, str]] = []
        self.requests: list[GenerateRequest] = []
        self.dropped: list[str] = []
        self.finished: list[tuple[str, str, int]] = []

    def decode(self, address: str) -> "Scripted":
        return Scripted(self, address)

    peer = decode

    def drop(self, address: str) -> None:
        self.dropped.append(address)


class Scripted:
    def __init__(self, nodes: Nodes, address: str) -> None:
        self._nodes = nodes
        self._address = address

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self._nodes.asked.append((self._address, request.prefill_address))
        self._nodes.requests.append(request)
        script = self._nodes.scripts.get(f"{self._address}_{request.prefill_address}")
        return (script or Stream(*DONE))(request)

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        self._nodes.finished.append((self._address, request, output_tokens))

    async def status(self) -> NodeStatus:
        raise AssertionError("requests ask for no status")

    async def estimate(self, call: EstimateCall) -> Estimate:
        raise PeerLost("no script says what it has")


def router(nodes: Nodes, prefills: int = 2, decodes: int = 2, clock: Clock | None = None) -> tuple[Router, Registry]:
    made = registry(prefills, decodes, clock)
    return Router(made, nodes), made


def down(nodes: Registry) -> set[str]:
    return {node.address for node in nodes if node.down}


def test_it_sets_the_prefill_node_and_passes_the_stream_on() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, _ = router(nodes)
        for _ in range(4):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert sorted(nodes.asked) == [("d0", "p0"), ("d0", "p1"), ("d1", "p0"), ("d1", "p1")]
        assert all(0 < r.remaining_s <= 30.0 for r in nodes.requests)
        assert service.status().requests == 0

    run(body)


@pytest.mark.parametrize(
    ("error", "then", "passed_over"),
    [
        (at(PeerLost("gone"), "d0"), ("d1", "p1"), {"d0"}),
        (at(PeerLost("gone"), "p0"), ("d1", "p1"), {"p0"}),
        (at(Draining("leaving"), "p0"), ("d1", "p1"), {"p0"}),
        (CapacityError("full", wanted=9), ("d1", "p1"), set()),
        (ContractMismatch(MISMATCH), ("d1", "p1"), set()),
        (at(LaneRefused("tcp"), "p0"), ("d1", "p1"), set()),
        (AddressRefused("p0", ["q*"]), ("d1", "p1"), set()),
        (at(NotAPrefillNode("who"), "p0"), ("d1", "p1"), {"p0"}),
        (RemoteError("Method not found!", code="UNIMPLEMENTED"), ("d1", "p1"), {"d0"}),
        (at(PeerLost("who knows where"), "p9"), ("d1", "p1"), set()),
        (at(TransferError("no end of a read"), "p0"), ("d1", "p1"), set()),
        (at(DeadlineExceeded("no answer to Connect"), "p0"), ("d1", "p1"), set()),
    ],
)
def test_a_refusal_before_the_first_token_goes_to_another_pair(
    error: PdkvError, then: tuple[str, str], passed_over: set[str]
) -> None:
    async def body() -> None:
        nodes = Nodes(d0_p0=Stream(error=error))
        service, registry = router(nodes)
        assert await collect(service.generate(samples.generate_request())) == DONE
        assert nodes.asked == [("d0", "p0"), then]
        assert down(registry) == passed_over

    run(body)


def test_a_node_that_is_gone_is_asked_once_and_later_passed_over() -> None:
    async def body() -> None:
        gone = {f"d0_p{i}": Stream(error=at(PeerLost("gone"), "d0")) for i in range(2)}
        nodes = Nodes(**gone)
        service, registry = router(nodes)
        for _ in range(4):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert [decode for decode, _ in nodes.asked].count("d0") == 1
        assert service.status().decode["d0"] == "PeerLost: gone"
        registry.mark_up(node(registry, "d0"))
        nodes.scripts.clear()
        for _ in range(2):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert nodes.asked[-1][0] == "d0" or nodes.asked[-2][0] == "d0"
        assert service.status().decode["d0"] == "up"

    run(body)


def test_a_node_that_is_gone_is_not_asked_again_for_the_same_request() -> None:
    async def body() -> None:
        nodes = Nodes(d0_p0=Stream(error=at(PeerLost("gone"), "d0")))
        service, _ = router(nodes, decodes=1)
        _, raised = await failure(service.generate(samples.generate_request()))
        assert isinstance(raised, PeerLost)
        assert nodes.asked == [("d0", "p0")]

    run(body)


@pytest.mark.parametrize(
    "error",
    [
        BoundsError("max_tokens", 0, "at least 1"),
        ProtocolError("bad"),
        NeverFits("larger than the pool"),
        AccountMismatch(MISMATCH),
        StalePages("reused"),
        DeadlineExceeded("late"),
        at(DeadlineExceeded("late"), "d0"),
        at(TransferError("no end of a read", accepted_by="p0"), "p0"),
    ],
)
def test_what_another_pair_would_not_mend_is_not_rerouted(error: PdkvError) -> None:
    async def body() -> None:
        nodes = Nodes(d0_p0=Stream(error=error))
        service, _ = router(nodes)
        seen, raised = await failure(service.generate(samples.generate_request()))
        assert (seen, raised) == ([], error)
        assert len(nodes.asked) == 1

    run(body)


def test_after_the_first_token_nothing_is_asked_twice() -> None:
    async def body() -> None:
        lost = at(PeerLost("gone"), "d0")
        nodes = Nodes(d0_p0=Stream(samples.TOKEN, error=lost))
        service, _ = router(nodes)
        seen, raised = await failure(service.generate(samples.generate_request()))
        assert (seen, raised) == ([samples.TOKEN], lost)
        assert len(nodes.asked) == 1

    run(body)


def test_when_every_pair_refuses_the_last_refusal_is_the_answer() -> None:
    async def body() -> None:
        full = {f"d{d}_p{p}": Stream(error=CapacityError(f"d{d} is full")) for d in range(2) for p in range(2)}
        nodes = Nodes(**full)
        service, registry = router(nodes)
        for address in ("p0", "p1", "d0", "d1"):
            learn(registry, address)
        _, raised = await failure(service.generate(samples.generate_request()))
        assert isinstance(raised, CapacityError)
        tried = [(r.prefill_address, *r.prefill_alternates) for r in nodes.requests]
        assert (sorted(d for d, _ in nodes.asked), [sorted(t) for t in tried]) == (["d0", "d1"], [["p0", "p1"]] * 2)

    run(body)


def test_no_pair_is_tried_past_the_deadline() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, _ = router(nodes)
        _, raised = await failure(service.generate(samples.generate_request(remaining_s=0.0)))
        assert isinstance(raised, DeadlineExceeded)
        assert nodes.asked == []

    run(body)


def test_closing_the_stream_closes_the_one_behind_it() -> None:
    async def body() -> None:
        stream = Stream(samples.TOKEN, hangs=True)
        service, _ = router(Nodes(d0_p0=stream))
        async with aclosing(service.generate(samples.generate_request())) as events:
            assert await anext(events) == samples.TOKEN
            assert service.status().requests == 1
        assert stream.ended.is_set()
        assert service.status().requests == 0

    run(body)


def test_a_client_may_not_choose_the_prefill_node() -> None:
    async def body() -> None:
        service, _ = router(Nodes())
        for chosen in ({"prefill_address": "p9:1"}, {"prefill_alternates": ("p9:1",)}):
            _, raised = await failure(service.generate(replace(samples.generate_request(), **chosen)))
            assert isinstance(raised, ProtocolError)

    run(body)


# --- what was taken on ------------------------------------------------------------------------------------------------


def test_what_a_prefill_node_took_on_and_failed_is_not_handed_on() -> None:
    async def body() -> None:
        lost = at(PeerLost("gone"), "p0")
        lost.fields = {**lost.fields, "accepted_by": "p0"}
        nodes = Nodes(d0_p0=Stream(error=lost))
        service, registry = router(nodes)
        _, raised = await failure(service.generate(samples.generate_request()))
        assert (raised, len(nodes.asked)) == (lost, 1)
        assert down(registry) == {"p0"}, "but the next one goes elsewhere"

    run(body)


def test_a_decode_node_is_told_of_other_prefill_nodes() -> None:
    async def body() -> None:
        lost = at(PeerLost("gone"), "p2")
        nodes = Nodes(d0_p0=Stream(error=lost))
        service, registry = router(nodes, prefills=4, decodes=2)
        for address in ("p0", "p1", "p2", "p3", "d0"):
            learn(registry, address)
        registry.mark_down(node(registry, "p1"), PeerLost("gone"))
        assert await collect(service.generate(samples.generate_request())) == DONE
        first, second = nodes.requests
        assert (first.prefill_address, first.prefill_alternates) == ("p0", ("p2", "p3"))
        assert down(registry) == {"p1", "p2"}, "the error says which of them it is about"
        assert second.prefill_address == "p3", "nobody asks p2 again"

    run(body)


def test_over_sockets_a_dead_node_costs_a_request_nothing_and_a_cancel_goes_through() -> None:
    async def body() -> None:
        async with serving(None, FakeDecode()) as (dead, _):
            gone = dead.address
        node = FakeDecode(Stream(*DONE))
        async with serving(None, node) as (server, directory):
            service = Router(Registry(["p:1"], [gone, server.address]), directory)
            async with serving(router=service) as (front, clients):  # type: ignore[arg-type]
                client = clients.router(front.address)
                assert await collect(client.generate(samples.generate_request())) == DONE
                assert node.stream.request.prefill_address == "p:1"
                assert (await client.status()).decode[gone].startswith("PeerLost")
                node.stream = Stream(samples.TOKEN, hangs=True)
                task = asyncio.create_task(collect(client.generate(samples.generate_request())))
                await soon(node.stream.waiting)
                task.cancel()
                await soon(node.stream.ended)

    run(body)


def test_a_node_that_is_down_is_the_answer_and_not_what_it_refused_before() -> None:
    async def body() -> None:
        refused = AddressRefused("p0", ["q*"])
        service, nodes = router(Nodes(d0_p0=Stream(error=refused)), 1, 1)
        for _ in range(2):
            _, raised = await failure(service.generate(samples.generate_request()))
            assert raised is refused
        nodes.unheard(node(nodes, "d0"), PeerLost("gone"))
        _, raised = await failure(service.generate(samples.generate_request()))
        assert str(raised) == "no decode node is up: d0: PeerLost: gone"

    run(body)


@pytest.mark.parametrize("instead", ["", "d0#1", "p9"])
def test_only_a_prefill_node_that_brought_the_prompt_is_up_by_a_first_token(instead: str) -> None:
    """Under some policies the decode node goes on without the one that it was sent to."""

    async def body() -> None:
        stays = Stream(replace(samples.TOKEN, instead=instead), hangs=True)
        service, nodes = router(Nodes(d0_p0=stays), 1, 1)
        nodes.mark_down(node(nodes, "p0"), PeerLost("gone"))
        async with aclosing(service.generate(samples.generate_request())) as events:
            await anext(events)
            assert service.status().prefill["p0"] == ("PeerLost: gone" if instead else "up")
            assert service.status().decode["d0"] == "up"
            assert node(nodes, "p0").trial is None, "whoever waits for how it goes may try it, too"

    run(body)


def test_who_waits_for_a_trial_that_ends_without_the_node_is_served_likewise() -> None:
    async def body() -> None:
        asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def goes_on(request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            asked.set()
            await may_go_on.wait()
            yield replace(samples.TOKEN, instead="d0#1")

        scripts = Nodes()
        scripts.scripts = {"d0_p0": goes_on}  # type: ignore[dict-item]
        service, nodes = router(scripts, 1, 1)
        nodes.mark_down(node(nodes, "p0"), PeerLost("gone"))
        first = asyncio.ensure_future(collect(service.generate(samples.generate_request())))
        await soon(asked)
        second = asyncio.ensure_future(collect(service.generate(samples.generate_request())))
        await turns(20)
        assert len(scripts.asked) == 1, "one tries it"
        may_go_on.set()
        assert await first == await second != []
        assert service.status().prefill["p0"] == "PeerLost: gone"

    run(body)


def test_another_prefill_node_that_brought_the_prompt_is_up() -> None:
    async def body() -> None:
        scripts = Nodes()
        service, nodes = router(scripts, 2, 1)
        for address in ("p0", "p1", "d0"):
            learn(nodes, address)

        def goes_on(request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            (other,) = request.prefill_alternates
            nodes.mark_down(node(nodes, other), PeerLost("for another request"))
            return Stream(replace(samples.TOKEN, instead=other), hangs=True)(request)

        scripts.scripts = dict.fromkeys(("d0_p0", "d0_p1"), goes_on)  # type: ignore[arg-type]
        async with aclosing(service.generate(samples.generate_request())) as events:
            await anext(events)
            assert service.status().prefill == {"p0": "up", "p1": "up"}

    run(body)


@pytest.mark.parametrize(("error", "lines"), [(CapacityError("full"), 0), (PeerLost("gone"), 2)])
def test_want_of_room_is_no_warning_a_pair(error: PdkvError, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        refused = {f"d{d}_p{p}": Stream(error=error) for d in range(2) for p in range(2)}
        _, raised = await failure(router(Nodes(**refused))[0].generate(samples.generate_request()))
        assert raised is error

    run(body)
    assert sum("trying another pair" in record.getMessage() for record in caplog.records) == lines
