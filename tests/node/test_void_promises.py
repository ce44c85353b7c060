"""A node whose promise is void, and that may be well, is asked once more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pdkv.errors import LeaseExpired
from pdkv.node.messages import Accepted, FailurePolicy, PagesSealed
from pdkv.node.stages import Stage
from tests.node.scene import alone, answers
from tests.node.trio import Trio, changed_events, fallible, play


def test_stale_pages_are_asked_for_again_at_the_same_node_once() -> None:
    async def scenario(trio: Trio) -> None:
        stale = 2

        def age(event: Any) -> Any:
            nonlocal stale
            if isinstance(event, Accepted) and event.cached is not None:
                return replace(event, cached=age(event.cached))
            if isinstance(event, PagesSealed) and event.first_index == 2 and stale:
                stale -= 1
                return replace(event, generations=event.generations - np.uint64(1))
            return event

        changed_events(trio.wires[0], age)
        asked = fallible(FailurePolicy.RETRY)
        tokens, done = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        wanted = [[asked.first_page_wanted for asked in wire.asked] for wire in trio.wires]
        # the two pages before the stale ones are kept if they had arrived by then; else the second attempt brings all
        assert (wanted, done.retries) in (([[0, 2], [2]], 2), ([[0, 0], []], 1))
        await trio.rested()

    play(scenario)


def test_a_node_whose_lease_ran_out_is_asked_once_more_after_the_others() -> None:
    """It may have been this node that stood still: the other one is as well as before."""

    async def scenario(trio: Trio) -> None:
        lost = 2

        def lose(*_: object) -> None:
            nonlocal lost
            if lost:
                lost -= 1
                raise LeaseExpired("no renewal was acknowledged in time")

        trio.on(Stage.COMMITTED, lose)
        trio.on(Stage.PREFILLED, lose)
        asked = fallible(FailurePolicy.RETRY)
        tokens, done = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        assert [len(wire.asked) for wire in trio.wires] == [2, 1]
        assert done.retries == 2
        await trio.rested()

    play(scenario)
