"""Every overlay builds, is what Kubernetes takes, and agrees with itself and with the processes that it starts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
from cloudcoil.models.cert_manager import v1 as cert_manager
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

from pdkv.rpc.health import LIVE, READY, state_of
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import Services
from tests.deploy import isolation, references, settings
from tests.deploy.cluster import K8S, Cluster, Object
from tests.rpc.fakes import LIMIT_S, FakeDecode, FakePrefill, FakeRouter
from tests.rpc.tls import served

OVERLAYS = sorted({path.name for path in (K8S / "overlays").iterdir()} - {"vllm"})
"""Of pdkv's own nodes; vLLM's has its tests beside these."""
VERSIONS = ("1.25", kubernetes_validate.latest_version())
CHECKS = [*references.ALL, *settings.ALL, *isolation.ALL]
OTHERS = {"cert-manager.io": cert_manager, "monitoring.coreos.com": prometheus_operator}
"""Kinds that Kubernetes itself doesn't know, by their group."""
Check = Callable[[Cluster], Iterator[str]]


@cache
def _built(overlay: str) -> Cluster:
    return Cluster.of(K8S / "overlays" / overlay)


def built(overlay: str) -> Cluster:
    """A copy, to do with as one likes."""
    return copy.deepcopy(_built(overlay))


def invalid(found: Object, version: str) -> str:
    """Why Kubernetes, or whoever defines that kind, would refuse the object or drop a field; empty: it takes it."""
    group = found["apiVersion"].partition("/")[0]
    if group in OTHERS:
        return _other_than(found, getattr(OTHERS[group], found["kind"]))
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def _other_than(found: Object, model: Any) -> str:
    """The models forgive a field that they don't know, and forget it."""
    kept = model.model_validate(found).model_dump(mode="json", by_alias=True, exclude_unset=True)
    return "" if kept == found else f"only {kept} is known"


def test_there_are_the_overlays_that_are_promised() -> None:
    assert {"cpu-demo", "mtls", "rdma"} <= set(OVERLAYS)
    assert (K8S / "overlays" / "vllm" / "kustomization.yaml").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    objects = built(overlay).objects
    assert [(o["kind"], o["metadata"]["name"], why) for o in objects if (why := invalid(o, version))] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_agrees_with_itself(overlay: str, check: Check) -> None:
    assert list(check(built(overlay))) == []


def test_restricted_is_left_for_locked_memory_only_and_by_nodes_only() -> None:
    for overlay in ("cpu-demo", "mtls"):
        assert not any(list(isolation.unrestricted(w)) for w in built(overlay).workloads)
    found = {w.name: set(isolation.unrestricted(w)) for w in built("rdma").workloads}
    locked = {"runAsNonRoot", "runAsUser 0", "capability IPC_LOCK"}
    assert found == {"prefill": locked, "decode": locked, "router": set()}


def test_the_name_of_the_nic_and_of_its_network_stand_in_one_place_each() -> None:
    words = [path.read_text("utf-8") for path in K8S.rglob("*.yaml")]
    assert sum(text.count("rdma~1hca_shared_devices_a") for text in words) == 1
    assert sum(text.count("k8s.v1.cni.cncf.io/networks") for text in words) == 1
    for name in ("prefill", "decode"):
        workload = built("rdma").workload(name)
        assert workload.container["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
        assert workload.object["spec"]["template"]["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma"}
        assert all(c.require_rdma for w, _, c in built("rdma").configs() if w.name == name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(
    ("role", "services"),
    [
        ("prefill", Services(prefill=FakePrefill())),
        ("decode", Services(decode=FakeDecode())),
        ("router", Services(router=FakeRouter())),
    ],
)
def test_what_probes_ask_is_answered_by_a_server_of_that_role(overlay: str, role: str, services: Services) -> None:
    (workload,) = [w for w in built(overlay).workloads if w.role == role]
    config = workload.config(workload.pod_names[0])
    asked = {
        kind: settings.asks(workload.container[f"{kind}Probe"], workload, config)
        for kind in ("startup", "readiness", "liveness")
    }

    async def body() -> list[dict[str, str]]:
        async with served(PlainText(), services) as server, asyncio.timeout(LIMIT_S):
            seen = []
            for serving in (True, False):
                await server.set_serving(serving=serving)
                answers = [state_of(server.address, PlainText(), service=s, within_s=LIMIT_S) for s in asked.values()]
                seen.append(dict(zip(asked, await asyncio.gather(*answers), strict=True)))
            return seen

    ready, unready = asyncio.run(body())
    assert set(ready.values()) == {"SERVING"}
    assert unready == {"startup": "SERVING", "readiness": "NOT_SERVING", "liveness": "SERVING"}
    assert (asked["readiness"], asked["liveness"]) == (READY, LIVE)
