"""One attempt of a prompt; what may go wrong in it is in `test_hostile_peer`, `test_intake` and `test_attempts`."""

from __future__ import annotations

import pytest

from pdkv.errors import ProtocolError
from pdkv.node.pull import MAX_LEASE_S, require_ttl


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 2 * MAX_LEASE_S])
def test_a_lease_that_can_not_be_kept_alive_is_refused(ttl_s: float) -> None:
    require_ttl(MAX_LEASE_S)
    with pytest.raises(ProtocolError, match="a lease of"):
        require_ttl(ttl_s)
