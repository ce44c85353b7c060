"""Addresses and ports."""

import pytest

from pdkv.errors import ConfigError
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.transport import Endpoint, advertised, make_server, open_port, require_address
from tests.rpc.fakes import run


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:0", "a-b.c_d:80"])
def test_addresses(address: str) -> None:
    assert require_address("address", address) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "unix:/run/x", "host:65536", "a b:1", "dns:///a:1", "::1:9"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        require_address("address", address)


def test_advertised_is_what_others_can_reach() -> None:
    assert advertised(Endpoint("127.0.0.1:0"), 41) == "127.0.0.1:41"
    assert advertised(Endpoint("0.0.0.0:0", "pod-1.pool"), 41) == "pod-1.pool:41"
    assert advertised(Endpoint("[::]:0", "[fd00::1]"), 41) == "[fd00::1]:41"
    assert advertised(Endpoint("0.0.0.0:0", "pod-1.pool:7000"), 41) == "pod-1.pool:7000"
    for endpoint in (Endpoint("0.0.0.0:0"), Endpoint("[::]:0"), Endpoint("127.0.0.1:0", "0.0.0.0")):
        with pytest.raises(ConfigError, match="advertise"):
            advertised(endpoint, 41)


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    async def body() -> None:
        first, second = (make_server([], Gate(), PlainText()) for _ in range(2))
        port = open_port(first, "127.0.0.1:0", PlainText())
        assert port > 0
        with pytest.raises(ConfigError, match=f"bind: '127.0.0.1:{port}'"):
            open_port(second, f"127.0.0.1:{port}", PlainText())
        await first.stop(0)
        await second.stop(0)

    run(body)
