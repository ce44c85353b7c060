"""Pages that a decode node offers to prefill: whose they are when the request ends, and what hostile offers come to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import BoundsError, CapacityError, DeadlineExceeded, LeaseExpired, ProtocolError
from pdkv.ids import LocalPages, PageHashes, RequestId
from pdkv.node.messages import GenerateRequest, LeaseCall, PrefillDone, PrefillRequest
from pdkv.node.prompt import plan_prompt
from tests.node.scene import alone, answers, held, prefill_request, recovered, run, said, until
from tests.node.test_matrix import equal_pages
from tests.node.test_pull_back import HANG, failures, right, talked
from tests.node.toy import Pair, make_pair

# --- who ends it meanwhile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["client", "prefill's lease", "time"])
def test_a_request_that_ends_during_a_pull_back_leaves_nothing_on_either_side(who: str) -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        pair.net.script(pair.decode.parts.name, HANG)
        asking = asyncio.create_task(
            answers(pair.decode.generate(replace(asked, remaining_s=0.3 if who == "time" else 30)))
        )
        await until(lambda: not pair.net._scripts[str(pair.decode.parts.name)])
        assert len(pair.prefill.source.leases) == 1
        if who == "client":
            asking.cancel()
        elif who == "prefill's lease":
            for lease in pair.prefill.source.leases.expire(math.inf):
                pair.prefill.source.let_go(lease.lease_id)
        await asyncio.wait([asking])
        error = None if asking.cancelled() else asking.exception()
        assert type(error) is {"client": type(None), "prefill's lease": LeaseExpired, "time": DeadlineExceeded}[who]
        await until(lambda: not pair.prefill.status().requests)
        assert not pair.decode.parts.manager.reservations
        assert pair.prefill.parts.manager.census()["quarantined"] == 2
        # what decode had offered is its own again, and the late bytes of it are nobody's
        pair.forget_decode()
        pair.net.settle(pair.decode.parts.name)
        await until(lambda: not held(pair.prefill))
        done = await right(pair, replace(asked, request_id=RequestId("again")))
        assert (done.shipment.pages_hit, done.shipment.pages_pulled_back) == (0, 0)
        await recovered(pair)

    run(scenario, make_pair())


def test_offered_pages_stay_as_long_as_the_request_runs() -> None:
    """Nobody else gets them, however short pages are: the reservation that hit them is what keeps them."""

    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        pair.net.script(pair.decode.parts.name, HANG)
        asking = asyncio.create_task(answers(pair.decode.generate(asked)))
        await until(lambda: not pair.net._scripts[str(pair.decode.parts.name)])
        manager = pair.decode.parts.manager
        with pytest.raises(CapacityError):
            manager.reserve(PageHashes(), manager.census()["total"] - 4, max_hit_pages=0)
        manager.end(manager.reserve(PageHashes(), manager.census()["free"], max_hit_pages=0))
        pair.net.settle(pair.decode.parts.name)
        tokens, done = await asking
        assert tuple(tokens) == alone(pair, asked)
        assert done.shipment.pages_pulled_back == 2
        await recovered(pair)

    run(scenario, make_pair())


# --- what a hostile or faulty caller may offer ------------------------------------------------------------------------


def offer(pair: Pair, asked: GenerateRequest, **changes: Any) -> PrefillRequest:
    """As decode would ask for it, with the pages that it has of it, and these changes to them."""
    parts = pair.decode.parts
    hashes = plan_prompt(asked.tokens, asked.namespace, parts.contract).hashes
    hit = LocalPages.kept(parts.manager.tree.match(hashes, limit=3).pages)
    offered = parts.columns(0, hit, hashes.part(0, 3))
    values = {name: change(getattr(offered, name)) for name, change in changes.items()}
    return prefill_request(pair, asked, first_page_wanted=3, offered=replace(offered, **values))


REFUSED: dict[str, tuple[dict[str, Callable[[Any], Any]], type[Exception]]] = {
    "other pages of the prompt": ({"first_index": lambda _: 1}, ProtocolError),
    "pages of another prompt": ({"hashes": lambda h: PageHashes(bytes(96))}, ProtocolError),
    "more than the prompt has": ({"hashes": lambda h: PageHashes(h.raw + bytes(96))}, ProtocolError),
    "out of its pool": ({"page_ids": lambda p: p + 1000}, BoundsError),
    "its write sink": ({"page_ids": lambda p: p * 0}, BoundsError),
    "one page thrice": ({"page_ids": lambda p: p * 0 + 5}, BoundsError),
}
IN_VAIN: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "another generation": ({"generations": lambda g: g + np.uint64(1)}, "StalePages"),
    "pages in another order": ({"page_ids": lambda p: p[::-1].copy()}, "StalePages"),
    "digests of other bytes": ({"digests": lambda d: d + np.uint64(1)}, "DigestMismatch"),
    "a column too short": ({"generations": lambda g: g[:2]}, "BoundsError"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_offer_that_can_not_be_is_refused_before_anything_moves(what: str) -> None:
    changes, kind = REFUSED[what]

    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        with pytest.raises(kind):
            await said(pair.prefill.prefill(offer(pair, asked, **changes)))
        assert not pair.prefill.status().borrow_failures
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("what", IN_VAIN)
def test_an_offer_that_proves_wrong_gets_nothing_into_the_tree(what: str) -> None:
    changes, kind = IN_VAIN[what]

    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        *_, done = await said(pair.prefill.prefill(offer(pair, asked, **changes)))
        assert isinstance(done, PrefillDone)
        assert (done.pages_pulled_back, done.chunk_starts) == (0, (64, 192))
        assert failures(pair) == {kind: 1}
        (lease,) = pair.prefill.source.leases.first(1)
        await pair.prefill.release_lease(LeaseCall(pair.decode.parts.envelope(pair.prefill.parts.name), lease.lease_id))
        await right(pair, asked)
        await equal_pages(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())


def test_control_a_right_offer_is_taken() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        *_, done = await said(pair.prefill.prefill(offer(pair, asked)))
        assert isinstance(done, PrefillDone)
        assert (done.pages_pulled_back, done.chunk_starts) == (2, (192,))

    run(scenario, make_pair())
