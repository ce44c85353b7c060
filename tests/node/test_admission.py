"""The draft hand-off: due or not, of the right lengths and ranges, and whole.

What else is checked of prefill's last words is in test_hostile_peer.py and test_prompt.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import ProtocolError
from pdkv.node.admission import require_handoff
from pdkv.node.messages import DraftHandoff, PrefillDone
from pdkv.node.prompt import draft_digest
from tests.node.scene import Meddler, answers, changed, prefill_request, recovered, request, run, said
from tests.node.test_speculation import MTP, SHARED
from tests.node.toy import PAGE, Pair, make_pair


@pytest.mark.parametrize("facts", [MTP, SHARED], ids=["mtp", "shared index"])
def test_prefill_hands_over_the_state_and_its_digest(facts: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        for length in (1, PAGE, 150):
            done = (await said(pair.prefill.prefill(prefill_request(pair, request(length, name=f"r{length}")))))[-1]
            assert isinstance(done, PrefillDone)
            assert done.draft is not None
            require_handoff(done.draft, pair.decode.parts.contract, length, 2)
            assert done.account.draft_digest == draft_digest(done.draft) != 0

    run(scenario, make_pair(both=facts), tidy=False)


def test_a_lost_hand_off_and_one_that_is_not_due_are_refused() -> None:
    async def scenario(pair: Pair) -> None:
        pair.directory.peers["p0"] = Meddler(pair, changed(PrefillDone, draft=None))
        with pytest.raises(ProtocolError, match="no draft hand-off, with 1 draft layers"):
            await answers(pair.decode.generate(request(150)))
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair(both=MTP))
    contract = make_contract()
    with pytest.raises(ProtocolError, match="a draft hand-off, with 0 draft layers"):
        require_handoff(HANDOFF, contract, 10, 2)


HANDOFF = DraftHandoff(
    np.zeros(2, np.float32), np.zeros(1, np.uint32), np.full(1, 0.5, np.float32), np.full(64, -1, np.int32)
)


def make_contract(**facts: Any) -> Any:
    pair = make_pair(both=facts)
    pair.close()
    return pair.decode.parts.contract


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": np.zeros(3, np.float32)}, "hidden of shape"),
        ({"hidden": np.array([0, np.nan], np.float32)}, "hidden holds"),
        ({"hidden": np.array([0, np.inf], np.float32)}, "hidden holds"),
        ({"tokens": np.zeros(2, np.uint32)}, "tokens of shape"),
        ({"tokens": np.array([257], np.uint32)}, "token 257 of 257"),
        ({"probabilities": np.zeros(0, np.float32)}, "probabilities of shape"),
        ({"probabilities": np.array([np.nan], np.float32)}, "probabilities outside"),
        ({"probabilities": np.array([1.5], np.float32)}, "probabilities outside"),
        ({"index_seed": np.zeros(0, np.int32)}, "index_seed of shape"),
        ({"index_seed": np.full(64, 10, np.int32)}, "index_seed outside"),
        ({"index_seed": np.full(64, -2, np.int32)}, "index_seed outside"),
    ],
)
def test_a_hand_off_has_the_lengths_and_ranges_that_are_due(change: dict[str, Any], named: str) -> None:
    contract = make_contract(**SHARED)
    require_handoff(HANDOFF, contract, 10, 2)
    with pytest.raises(ProtocolError, match=named):
        require_handoff(replace(HANDOFF, **change), contract, 10, 2)


@pytest.mark.parametrize("field", ["hidden", "tokens", "probabilities", "index_seed", "logits_digest"])
def test_the_digest_covers_every_part(field: str) -> None:
    value = getattr(HANDOFF, field)
    assert draft_digest(replace(HANDOFF, **{field: value + 1})) != draft_digest(HANDOFF)
    assert draft_digest(None) == 0
