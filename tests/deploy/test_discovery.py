"""Nodes that are found: more or fewer need no other change, by DNS and by the API of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import isolation, references, settings
from tests.deploy.cluster import Cluster, with_component
from tests.deploy.test_overlays import CHECKS, OVERLAYS, VERSIONS, built, invalid


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("replicas", [1, 2, 7])
def test_another_number_of_replicas_needs_no_other_change(overlay: str, role: str, replicas: int) -> None:
    cluster = built(overlay)
    cluster.get("StatefulSet", role)["spec"]["replicas"] = replicas
    assert list(settings.addresses(cluster)) == []
    assert list(settings.certificates(cluster)) == []


def by_the_api(overlay: str, folder: Path) -> Cluster:
    return with_component(overlay, "discovery-api", folder)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_goes_with_every_overlay(overlay: str, tmp_path: Path) -> None:
    """What was true of the overlay stays true; routers ask the API, and nobody else may."""
    cluster = by_the_api(overlay, tmp_path)
    assert [complaint for check in CHECKS for complaint in check(cluster)] == []
    assert [why for o in cluster.objects for version in VERSIONS if (why := invalid(o, version))] == []
    assert {o["kind"] for o in cluster.objects} >= {"Role", "RoleBinding"}
    tokens = {w.name for w in cluster.workloads if w.pod["automountServiceAccountToken"]}
    assert tokens == {"router"}
    (namespace,) = {o["metadata"]["namespace"] for o in cluster.all("Role", "RoleBinding", "ServiceAccount")}
    assert namespace == "pdkv"


def _more_rights(cluster: Cluster) -> None:
    cluster.get("Role", "router")["rules"][0]["verbs"].append("delete")


def _no_binding(cluster: Cluster) -> None:
    cluster.objects.remove(cluster.get("RoleBinding", "router"))


def _of_nothing(cluster: Cluster) -> None:
    cluster.get("RoleBinding", "router")["roleRef"]["name"] = "nobody"


def _for_all(cluster: Cluster) -> None:
    cluster.get("RoleBinding", "router")["subjects"].append({"kind": "ServiceAccount", "name": "pdkv"})


def _no_token(cluster: Cluster) -> None:
    cluster.workload("router").pod["automountServiceAccountToken"] = False


def _no_account(cluster: Cluster) -> None:
    cluster.objects.remove(cluster.get("ServiceAccount", "router"))


def _no_way(cluster: Cluster) -> None:
    cluster.objects.remove(cluster.get("NetworkPolicy", "api-server"))


def _other_service(cluster: Cluster) -> None:
    for entry in cluster.workload("router").container["env"]:
        if entry["name"] == "PDKV_PREFILL_ADDRESSES":
            entry["value"] = "k8s:prefil"


@pytest.mark.parametrize(
    ("check", "change", "words"),
    [
        (isolation.rights, _more_rights, "Role router: a router asks nothing else"),
        (isolation.rights, _no_binding, "router: may not see endpoints"),
        (isolation.rights, _of_nothing, "router: may not see endpoints"),
        (isolation.rights, _for_all, "prefill: may see endpoints"),
        (isolation.rights, _no_token, "router: has no token"),
        (references.mounts, _no_account, "no ServiceAccount router"),
        (isolation.network, _no_way, "router to internet:443"),
        (settings.addresses, _other_service, "lacks prefill-0.prefill:7000"),
    ],
)
def test_what_is_wrong_with_it_is_found(
    check: Callable[[Cluster], Any], change: Callable[[Cluster], None], words: str, tmp_path: Path
) -> None:
    cluster = by_the_api("cpu-demo", tmp_path)
    change(cluster)
    complaints = list(check(cluster))
    assert any(words in complaint for complaint in complaints), complaints
