"""A conversation over two nodes, with a real model: bit for bit that of one process which keeps its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.monolith import Monolith
from pdkv.geometry.page_layout import page_format
from pdkv.ids import RequestId
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Sampling
from pdkv.node.preemption import PreemptPolicy
from pdkv.node.prefill import PrefillNode
from tests.adapters.reference.test_pressed_nodes import heard, reference_pair
from tests.node.scene import request, rested, run
from tests.node.toy import CHUNK, PAGE, Pair

SAMPLINGS = (Sampling(70), Sampling(80, temperature=0.8, top_p=0.95, seed=1), Sampling(70))


@pytest.mark.parametrize("pulls", [True, False])
def test_three_turns(tiny: LoadedModel, *, pulls: bool) -> None:
    """The control: where prefill computes what decode has, in chunks, it rounds otherwise."""

    async def scenario(pair: Pair) -> None:
        pool = SlotPool.create(page_format(tiny.shape), 40)
        one = Monolith(ReferenceEngine(tiny, pool), pool, pair.prefill.parts.contract, CHUNK)
        one.caches_answers = True
        if not pulls:
            settings = replace(pair.prefill.settings, pull_back_s=None)
            pair.prefill = pair.directory.peers["p0"] = PrefillNode(pair.prefill.parts, settings)
        tokens, same = request(150, seed=3).tokens, []
        for turn, sampling in enumerate(SAMPLINGS):
            asked = replace(request(1), request_id=RequestId(f"turn-{turn}"), tokens=tokens, sampling=sampling)
            said, done = await heard(pair, replace(asked, want_logits=True))
            alone = one.generate(tokens, sampling)
            same.append(said == list(zip(alone.tokens, alone.logits_digests, strict=True)))
            if pulls:
                assert (done.chunk_starts, done.shipment.pages_hit) == (alone.chunk_starts, alone.pages_hit)
                assert done.shipment.pages_pulled_back == min(turn, 1)
                assert done.chunk_starts[0] == done.shipment.pages_hit * PAGE
            more = request(60, seed=turn + 10).tokens
            tokens = np.concatenate((tokens, np.array(alone.tokens), more)).astype(np.uint32)
        assert same == [True, *[pulls] * 2]
        await rested(pair)

    run(scenario, reference_pair(tiny, 40, PreemptPolicy.NONE))
