"""Pages that prefill has when it is asked: they are told with the first message, and once."""

from __future__ import annotations

from dataclasses import replace

from pdkv.ids import RequestId
from pdkv.node.messages import Accepted, LeaseCall, PrefillDone
from tests.node.scene import prefill_request, recovered, request, run, said
from tests.node.toy import Pair, make_pair


def test_what_is_cached_is_told_with_the_first_message_and_only_there() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        envelope = pair.decode.parts.envelope(pair.prefill.parts.name)
        asked = prefill_request(pair, request(300))
        for first, told in ((0, None), (1, (1, 3)), (4, None), (0, (0, 4))):
            own = replace(asked, request_id=RequestId(f"r{first}{told}"), first_page_wanted=first)
            accepted, *later = await said(pair.prefill.prefill(own))
            assert isinstance(accepted, Accepted)
            cached = accepted.cached
            assert (cached and (cached.first_index, len(cached.hashes))) == told
            if first or told:
                assert [type(event) for event in later] == [PrefillDone]
            await pair.prefill.release_lease(LeaseCall(envelope, accepted.lease_id))
        await recovered(pair)

    run(scenario, make_pair())
