"""The benchmark of overlapping pulls: what counts as exposed."""

from __future__ import annotations

import pytest

from benchmarks.streaming import row
from pdkv.node.messages import Shipment


def test_exposed_is_from_prefills_own_end_and_not_from_when_decode_heard_of_it() -> None:
    """Medians one by one; the fraction is that of each request."""
    times = ((2.0, 2.5, 1.0), (2.0, 2.25, 0.5), (4.0, 6.0, 8.0))
    shipments = [Shipment(prefill_s=p, ttft_s=t, transfer_s=w, exposed_transfer_s=0.01) for p, t, w in times]
    found = row(8, shipments)
    assert (found.exposed_s, found.exposed_fraction) == (0.5, 0.5)
    assert found.ttft_over_alone == pytest.approx(1.25)
