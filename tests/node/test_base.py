"""The parts of a node: what they say of it, and in which order they go."""

from __future__ import annotations

import xxhash

from pdkv.contract import ContractFacts
from pdkv.transfer.backends.loopback import LoopbackNet
from tests.node.scene import answers, request, rested, run
from tests.node.toy import Pair, make_pair, make_parts


def test_a_node_introduces_itself_with_what_it_has() -> None:
    here = make_parts("here", ContractFacts(weights_id="toy"), LoopbackNet(), pages=4)
    other = make_parts("other", ContractFacts(weights_id="toy"), LoopbackNet(), pages=4)
    try:
        intro, envelope = here.intro(), here.envelope(other.name)
        assert (intro.name, intro.contract, intro.pool) == (here.name, here.contract, here.pool.map())
        assert intro.metadata_checksum == xxhash.xxh3_64_intdigest(intro.agent_metadata)
        assert (envelope.sender, envelope.receiver) == (here.name, other.name)
        assert envelope.content_fingerprint == here.contract.content_fingerprint
        assert here.readiness is not other.readiness
    finally:
        here.close()
        other.close()


def test_threads_end_before_the_agent_that_they_could_still_write_beside() -> None:
    parts = make_parts("here", ContractFacts(weights_id="toy"), LoopbackNet(), pages=4)
    order: list[str] = []
    for name in ("steps", "digests", "transfer"):
        thing = getattr(parts, name)
        thing.close = lambda name=name, close=thing.close: (order.append(name), close())
    parts.close()
    assert order == ["steps", "digests", "transfer"]


def test_what_moves_between_nodes_is_counted_where_it_ends_and_where_it_is_announced() -> None:
    async def scenario(pair: Pair) -> None:
        _, done = await answers(pair.decode.generate(request(300)))
        await rested(pair)
        shipment, decode, prefill = done.shipment, pair.decode.status(), pair.prefill.status()
        for node, way in ((decode, "read"), (prefill, "announced")):
            moved = {name: count for name, count in node.totals.items() if count}
            assert moved == {f"{way}_main_bytes": shipment.bytes_main, f"{way}_index_bytes": shipment.bytes_index}
        assert decode.uses == {"evictable": decode.pages["cached"], "locked": 0}

    run(scenario, make_pair())
