"""What a prefill node still has to compute."""

from __future__ import annotations

import asyncio

import pytest

from pdkv.node.backlog import Backlog
from pdkv.node.messages import Accepted, LeaseCall
from tests.node.scene import prefill_request, recovered, request, run, said, until
from tests.node.toy import Pair, make_pair


def test_prompts_count_until_they_are_computed_or_gone() -> None:
    backlog = Backlog()
    with backlog.taken_on(1000) as first:
        with backlog.taken_on(300) as second:
            assert backlog.tokens == 1300
            first.computed(640)
            assert backlog.tokens == 660
            second.computed(400)
            assert backlog.tokens == 360, "nobody computes more than there was"
        assert backlog.tokens == 360
        first.left(500)
        assert backlog.tokens == 500, "more of it has to be computed than was thought"
        with pytest.raises(ValueError, match="failed"), backlog.taken_on(500):
            raise ValueError("failed")
        assert backlog.tokens == 500
    assert backlog.tokens == 0


def test_a_prompt_counts_while_it_waits_for_pages_but_for_what_is_cached() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        node = pair.prefill
        first, *_ = await said(node.prefill(prefill_request(pair, request(300, name="first"))))
        assert isinstance(first, Accepted)
        again = prefill_request(pair, request(300, name="again"))
        others = [again, prefill_request(pair, request(300, seed=1, name="other"))]
        asking = [asyncio.create_task(said(node.prefill(asked))) for asked in others]
        await until(lambda: len(node.queue) == 2)
        assert node.status().waiting_tokens == node.backlog.tokens == (300 - 4 * 64) + 300
        asking.pop().cancel()
        await until(lambda: len(node.queue) == 1)
        assert node.backlog.tokens == 300 - 4 * 64, "whoever gives up is no work any more"
        await node.release_lease(LeaseCall(again.envelope, first.lease_id))
        other, *_ = await asking[0]
        assert isinstance(other, Accepted)
        await node.release_lease(LeaseCall(again.envelope, other.lease_id))
        await recovered(pair)

    run(scenario, make_pair(prefill_pages=6))
