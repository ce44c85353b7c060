"""What a service raises by mistake stays inside its call."""

import logging

import pytest

from pdkv.errors import DeadlineExceeded, PdkvError
from pdkv.rpc import interceptors
from tests.rpc import samples
from tests.rpc.fakes import FakePrefill, Stream, collect, failure, run, serving


def test_a_bug_ends_its_call_and_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        secret = ValueError("a secret of this node")
        node = FakePrefill(Stream(samples.ACCEPTED, error=secret), error=secret)
        async with serving(node) as (server, directory):
            peer = directory.peer(server.address)
            _, error = await failure(peer.prefill(samples.prefill_request()))
            assert type(error) is PdkvError
            assert "/pdkv.v1.Prefill/Prefill failed with ValueError" in str(error)
            assert "secret" not in str(error)
            with pytest.raises(PdkvError, match="failed with ValueError"):
                await peer.renew_lease(samples.LEASE_CALL)
            node.stream = Stream(samples.ACCEPTED)
            assert await collect(peer.prefill(samples.prefill_request())) == [samples.ACCEPTED]

    with caplog.at_level(logging.ERROR, "pdkv.rpc.interceptors"):
        run(body)
    assert len(caplog.records) == 2
    assert all("a secret of this node" in str(r.exc_info) for r in caplog.records)


def test_a_unary_call_ends_even_if_its_client_set_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(FakePrefill):
        async def renew_lease(self, call: object) -> float:
            async for _ in Stream(hangs=True)(call):
                pass
            return 0.0

    async def body() -> None:
        monkeypatch.setattr(interceptors, "UNARY_DEADLINE_S", 0.1)
        async with serving(Stuck()) as (server, directory):
            with pytest.raises(DeadlineExceeded, match="RenewLease did not end within"):
                await directory.peer(server.address).renew_lease(samples.LEASE_CALL)

    run(body)
