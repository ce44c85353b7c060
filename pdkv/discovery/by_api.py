"""Nodes of a Service of Kubernetes, by the EndpointSlices that its API keeps of it.

Guarantees: changes are told as the API tells them; pods that end are left out from the moment it is known, and whether
another one can serve is asked of itself and not of Kubernetes; a pod with a name of its own (of a StatefulSet, by its
headless Service) is called by that name, as by DNS; every call has a deadline, and a watch that has ended, whyever, is
followed by a new list.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from pdkv.discovery.words import Slices, host_and_port
from pdkv.errors import DiscoveryFailed, MissingDependency

try:
    import aiohttp
    from kubernetes.aio import client, config
except ModuleNotFoundError as error:
    raise MissingDependency("kubernetes", "k8s: in a list of addresses", extra="kubernetes") from error

CALL_S = 5.0
"""For a list, and for a watch to end that should have."""
WATCH_S = 30
"""The API is asked to end a watch after so long: one that hangs is noticed then."""
POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
OK, GONE = 200, 410
"""What the API says; the latter of a version that it has forgotten."""


class _Conditions(BaseModel):
    terminating: bool | None = None


class _Endpoint(BaseModel):
    addresses: list[str] = Field(min_length=1)
    hostname: str | None = None
    conditions: _Conditions = _Conditions()


class _Port(BaseModel):
    name: str | None = None
    port: int | None = None


class _Metadata(BaseModel):
    name: str = ""
    resource_version: str = Field("", alias="resourceVersion")


class EndpointSlice(BaseModel):
    """As much of it as counts here. Lists may be null."""

    metadata: _Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Listed(BaseModel):
    metadata: _Metadata
    items: list[EndpointSlice]


class _Event(BaseModel):
    """A line of a watch."""

    type: str
    object: dict[str, Any]


class ApiSource:
    """Lists and watches, until the watch ends."""

    def __init__(self, place: Slices) -> None:
        self._place = place

    async def lists(self) -> AsyncGenerator[tuple[str, ...], None]:
        try:
            async with _api() as (api, namespace):
                async for slices in _followed(api, self._place.namespace or namespace, self._place.service):
                    yield addresses(slices, self._place)
        except client.ApiException as error:
            raise DiscoveryFailed(str(self._place), f"the API answers {error.status} {error.reason}") from error
        except (aiohttp.ClientError, OSError, ValueError, config.ConfigException) as error:
            raise DiscoveryFailed(str(self._place), f"{type(error).__name__}: {error}") from error


def addresses(slices: Iterable[EndpointSlice], place: Slices) -> tuple[str, ...]:
    """Of all pods that don't end, sorted. Raises `ValueError` for what nobody could dial."""
    found: set[str] = set()
    for each in slices:
        port = next((p.port for p in each.ports or () if p.name == place.port), None)
        for endpoint in each.endpoints or ():
            if port is not None and not endpoint.conditions.terminating:
                host = _name(endpoint.hostname, place) if endpoint.hostname else endpoint.addresses[0]
                found.add(host_and_port(host, port))
    return tuple(sorted(found))


def _name(hostname: str, place: Slices) -> str:
    """As DNS of the cluster has it, no longer than is needed in this pod's namespace."""
    return ".".join((hostname, place.service, *((place.namespace, "svc") if place.namespace else ())))


@asynccontextmanager
async def _api() -> AsyncGenerator[tuple[client.ApiClient, str], None]:
    """A client with the rights of this pod, or outside of a cluster of KUBECONFIG; and its own namespace."""
    settings = client.Configuration()
    if POD.exists():
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        namespace = POD.read_text("utf-8").strip()
    else:
        await config.load_kube_config(client_configuration=settings, persist_config=False)  # type: ignore[no-untyped-call]
        namespace = config.list_kube_config_contexts()[1]["context"].get("namespace", "default")  # type: ignore[no-untyped-call]
    async with client.ApiClient(settings) as api:
        yield api, namespace


async def _followed(
    api: client.ApiClient, namespace: str, service: str
) -> AsyncGenerator[Iterable[EndpointSlice], None]:
    """What is there, and again after each change, until the watch ends."""
    ask = client.DiscoveryV1Api(api).list_namespaced_endpoint_slice_without_preload_content
    selector = f"kubernetes.io/service-name={service}"
    async with await ask(namespace, label_selector=selector, _request_timeout=CALL_S) as response:
        _require_ok(response.status, response.reason)
        listed = _Listed.model_validate_json(await response.read())
    slices = {each.metadata.name: each for each in listed.items}
    yield slices.values()
    since, limit_s = listed.metadata.resource_version, WATCH_S + CALL_S
    async with await ask(
        namespace,
        label_selector=selector,
        watch=True,
        resource_version=since,
        timeout_seconds=WATCH_S,
        _request_timeout=limit_s,
    ) as response:
        if response.status == GONE:
            return
        _require_ok(response.status, response.reason)
        while line := await response.content.readline():
            event = _Event.model_validate_json(line)
            if event.type == "ERROR":
                if event.object.get("code") == GONE:
                    return
                _require_ok(int(event.object.get("code", 0)), event.object.get("message"))
            changed = EndpointSlice.model_validate(event.object)
            if event.type == "DELETED":
                slices.pop(changed.metadata.name, None)
            else:
                slices[changed.metadata.name] = changed
            yield slices.values()


def _require_ok(status: int, reason: object) -> None:
    """Raises `ApiException`."""
    if status != OK:
        raise client.ApiException(status=status, reason=reason)
