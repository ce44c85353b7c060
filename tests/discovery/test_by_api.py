"""Nodes by the API of Kubernetes, from a real HTTP server that lists and watches as it does."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.config import incluster_config, kube_config

from pdkv.discovery import by_api
from pdkv.discovery.by_api import ApiSource, EndpointSlice, addresses
from pdkv.discovery.words import Slices
from pdkv.errors import DiscoveryFailed
from tests.certificates import HERE, Authority
from tests.discovery.api_server import NAMESPACE, ApiServer, api_server, endpoint, kubeconfig

PLACE = Slices("", "prefill")
BOTH = ("prefill-0.prefill:7000", "prefill-1.prefill:7000")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ApiServer], Awaitable[None]]], None]:
    """A test's body with a server that KUBECONFIG leads to."""

    def running(body: Callable[[ApiServer], Awaitable[None]]) -> None:
        async def served() -> None:
            async with asyncio.timeout(30), api_server() as server:
                path = kubeconfig(tmp_path / "config", server)
                monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
                server.put("prefill-abc", [endpoint("prefill-0"), endpoint("prefill-1")])
                await body(server)

        asyncio.run(served())

    return running


def lists(place: Slices = PLACE) -> aclosing[AsyncGenerator[tuple[str, ...], None]]:
    return aclosing(ApiSource(place).lists())


Run = Callable[[Callable[[ApiServer], Awaitable[None]]], None]


def test_what_is_listed_and_every_change_is_told(run: Run) -> None:
    async def body(server: ApiServer) -> None:
        async with lists() as found:
            assert await anext(found) == BOTH
            told = asyncio.ensure_future(anext(found))
            await server.watched.wait()
            server.put("prefill-def", [endpoint("prefill-2")])
            assert await told == (*BOTH, "prefill-2.prefill:7000")
            server.put("prefill-abc", [endpoint("prefill-0", terminating=True, serving=True), endpoint("prefill-1")])
            assert await anext(found) == ("prefill-1.prefill:7000", "prefill-2.prefill:7000")
            server.delete("prefill-def")
            assert await anext(found) == ("prefill-1.prefill:7000",)
            server.put("prefill-abc", None)
            assert await anext(found) == ()
        assert server.asked[0] == {"labelSelector": "kubernetes.io/service-name=prefill"}
        assert server.asked[1]["resourceVersion"] == "101"
        assert server.asked[1]["timeoutSeconds"] == str(by_api.WATCH_S)
        assert set(server.tokens) == {"Bearer secret"}

    run(body)


def test_a_change_between_list_and_watch_is_not_missed(run: Run) -> None:
    async def body(server: ApiServer) -> None:
        async with lists() as found:
            await anext(found)
            server.put("prefill-def", [endpoint("prefill-2")])
            assert await anext(found) == (*BOTH, "prefill-2.prefill:7000")

    run(body)


@pytest.mark.parametrize("end", [ApiServer.end, ApiServer.forget])
def test_a_watch_that_ends_or_is_gone_ends_the_lists_without_a_failure(
    run: Run, end: Callable[[ApiServer], None]
) -> None:
    """They are begun anew then."""

    async def body(server: ApiServer) -> None:
        async with lists() as found:
            await anext(found)
            told = asyncio.ensure_future(anext(found))
            await server.watched.wait()
            end(server)
            with pytest.raises(StopAsyncIteration):
                await told
        async with lists() as found:
            assert await anext(found) == BOTH

    run(body)


def test_a_version_that_is_gone_already_ends_the_lists_too(run: Run) -> None:
    async def body(server: ApiServer) -> None:
        server.watch_status = by_api.GONE
        async with lists() as found:
            assert [each async for each in found] == [BOTH]

    run(body)


def test_a_watch_ends_by_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_api, "WATCH_S", 1)

    async def body(server: ApiServer) -> None:
        async with lists() as found:
            assert [each async for each in found] == [BOTH]

    run(body)


def test_a_server_that_hangs_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts and says nothing, at the list; one that doesn't end its watch."""
    monkeypatch.setattr(by_api, "CALL_S", 0.3)

    async def body(server: ApiServer) -> None:
        server.silent = True
        with pytest.raises(DiscoveryFailed, match="TimeoutError"):
            await _first()

    run(body)
    monkeypatch.setattr(by_api, "WATCH_S", 0)
    run(_never_ends)


async def _first() -> tuple[str, ...]:
    async with lists() as found:
        return await anext(found)


async def _never_ends(server: ApiServer) -> None:
    server.patience_s = 30.0
    with pytest.raises(DiscoveryFailed, match="TimeoutError"):
        async with lists() as found:
            assert [each async for each in found] == [BOTH]


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_a_refusal_is_named(run: Run, status: int) -> None:
    async def body(server: ApiServer) -> None:
        server.status = status
        with pytest.raises(DiscoveryFailed, match=f"k8s:prefill:grpc: the API answers {status} "):
            await _first()
        server.status, server.watch_status = 200, status
        with pytest.raises(DiscoveryFailed, match=f"the API answers {status} "):
            async with lists() as found:
                assert [each async for each in found] == [BOTH]

    run(body)


@pytest.mark.parametrize(
    "line",
    [
        "no JSON\n",
        '{"type": "ADDED"}\n',
        '{"type": "ADDED", "object": {"metadata": {}, "endpoints": [{}]}}\n',
        '{"type": "ERROR", "object": {"code": 500, "message": "no"}}\n',
        '{"type": "ERROR", "object": {}}\n',
    ],
)
def test_what_makes_no_sense_is_a_failure_and_nothing_else(run: Run, line: str) -> None:
    async def body(server: ApiServer) -> None:
        async with lists() as found:
            await anext(found)
            told = asyncio.ensure_future(anext(found))
            await server.watched.wait()
            server.write(line)
            with pytest.raises(DiscoveryFailed, match="k8s:prefill:grpc: "):
                await told

    run(body)


def test_nobody_listens(run: Run) -> None:
    async def body(server: ApiServer) -> None:
        kubeconfig(Path(kube_config.KUBE_CONFIG_DEFAULT_LOCATION), ApiServer("http://127.0.0.1:1"))
        with pytest.raises(DiscoveryFailed, match="Cannot connect"):
            await _first()

    run(body)


def test_in_no_pod_and_without_kubeconfig_it_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: ApiServer) -> None:
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
        with pytest.raises(DiscoveryFailed, match="ConfigException"):
            await _first()

    run(body)


def test_in_a_pod_its_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token, the CA of the cluster, its namespace; over TLS."""
    ca = Authority("cluster")
    files = ca.files(tmp_path, *HERE)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)
    (tmp_path / "token").write_text("of-the-pod", "utf-8")
    (tmp_path / "namespace").write_text(NAMESPACE, "utf-8")
    monkeypatch.setattr(by_api, "POD", tmp_path / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(files.ca))

    async def body() -> None:
        async with asyncio.timeout(30), api_server(tls) as server:
            server.put("prefill-abc", [endpoint("prefill-0")])
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.address.rpartition(":")[2])
            assert await _first() == ("prefill-0.prefill:7000",)
            assert server.tokens[0].lower() == "bearer of-the-pod"

    asyncio.run(body())


def one(*endpoints: dict[str, Any], port: str = "grpc") -> EndpointSlice:
    ports = [{"name": port, "port": 7000}]
    return EndpointSlice.model_validate({"metadata": {"name": "x"}, "endpoints": endpoints, "ports": ports})


@pytest.mark.parametrize(
    ("place", "found", "wanted"),
    [
        (PLACE, one(endpoint("", "10.0.0.7")), ("10.0.0.7:7000",)),
        (PLACE, one(endpoint("", "fd00::7")), ("[fd00::7]:7000",)),
        (PLACE, one(endpoint("p-0")), ("p-0.prefill:7000",)),
        (Slices("other", "prefill"), one(endpoint("p-0")), ("p-0.prefill.other.svc:7000",)),
        (PLACE, one(endpoint("p-0", ready=False, serving=False)), ("p-0.prefill:7000",)),
        (PLACE, one(endpoint("p-0", terminating=True)), ()),
        (PLACE, one(endpoint("p-0"), port="http"), ()),
        (Slices("", "prefill", "http"), one(endpoint("p-0"), port="http"), ("p-0.prefill:7000",)),
    ],
)
def test_who_is_meant(place: Slices, found: EndpointSlice, wanted: tuple[str, ...]) -> None:
    assert addresses([found], place) == wanted
    assert addresses([found, found], place) == wanted
