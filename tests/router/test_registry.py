"""Which nodes are passed over, and for how long."""

import pytest

from pdkv.errors import ConfigError
from pdkv.router.registry import Registry


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_failed_node_is_passed_over_for_a_while() -> None:
    clock = Clock()
    registry = Registry(["p:1"], ["d:1", "d:2"], retry_s=5.0, now=clock)
    assert registry.usable("d:1")
    registry.mark_down("d:1", "PeerLost: gone")
    assert not registry.usable("d:1")
    assert registry.usable("d:2")
    clock.now_s += 5.0
    assert registry.usable("d:1"), "tried again"
    assert registry.status(2).decode == {"d:1": "PeerLost: gone", "d:2": "up"}
    registry.mark_up("d:1")
    clock.now_s -= 5.0
    assert registry.usable("d:1")
    status = registry.status(3)
    assert (status.prefill, status.decode, status.requests) == ({"p:1": "up"}, {"d:1": "up", "d:2": "up"}, 3)


@pytest.mark.parametrize(("prefill", "decode"), [([], ["d:1"]), (["p:1"], []), (["p:1", "p:1"], ["d:1"])])
def test_lists_are_not_empty_and_hold_each_once(prefill: list[str], decode: list[str]) -> None:
    with pytest.raises(ConfigError, match="addresses"):
        Registry(prefill, decode)
