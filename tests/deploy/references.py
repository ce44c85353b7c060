"""Checks of what names what: each is a function from a cluster to complaints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from pdkv import __version__
from tests.deploy.cluster import Cluster, Workload

CLUSTER_WIDE = {"Namespace"}


def selectors(cluster: Cluster) -> Iterator[str]:
    """Each selector means pods that are there, and no pod has two owners."""
    for workload in cluster.workloads:
        if workload not in cluster.selected(workload.object["spec"]["selector"]):
            yield f"{workload.name}: its selector doesn't select its own pods"
        if len(cluster.selected(workload.object["spec"]["selector"])) > 1:
            yield f"{workload.name}: its selector selects other pods too"
        for spread in workload.pod.get("topologySpreadConstraints", []):
            if workload not in cluster.selected(spread["labelSelector"]):
                yield f"{workload.name}: is spread by the labels of others"
        for term in _pod_affinities(workload):
            if not cluster.selected(term["labelSelector"]):
                yield f"{workload.name}: wants to be near pods that don't exist"
    for service in cluster.all("Service"):
        if len(cluster.selected(service["spec"]["selector"])) != 1:
            yield f"Service {service['metadata']['name']}: selects not one role"
    for found in cluster.all("PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = found["spec"]
        if not cluster.selected(spec.get("podSelector") or spec["selector"]):
            yield f"{found['kind']} {found['metadata']['name']}: selects nothing"


def _pod_affinities(workload: Workload) -> Iterator[dict[str, Any]]:
    for weighted in (
        workload.pod.get("affinity", {})
        .get("podAffinity", {})
        .get("preferredDuringSchedulingIgnoredDuringExecution", [])
    ):
        yield weighted["podAffinityTerm"]


def ports(cluster: Cluster) -> Iterator[str]:
    """Each port that is named, or given by number, is one of the container's."""
    for workload in cluster.workloads:
        if len(set(workload.ports.values())) < len(workload.ports):
            yield f"{workload.name}: a port with two names"
    for service in cluster.all("Service"):
        for port in service["spec"]["ports"]:
            for workload in cluster.selected(service["spec"]["selector"]):
                if port["targetPort"] not in {*workload.ports, *workload.ports.values()}:
                    yield f"Service {service['metadata']['name']}: {workload.name} has no port {port['targetPort']}"
    for monitor in cluster.all("PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for workload in cluster.selected(monitor["spec"]["selector"]):
                if endpoint["port"] not in workload.ports:
                    yield f"PodMonitor {monitor['metadata']['name']}: {workload.name} has no port {endpoint['port']}"
    for policy in cluster.all("NetworkPolicy"):
        named = {p["port"] for rule in policy["spec"].get("ingress", []) for p in rule.get("ports", [])}
        for workload in cluster.selected(policy["spec"]["podSelector"]):
            for port in named - {*workload.ports, *workload.ports.values()}:
                yield f"NetworkPolicy {policy['metadata']['name']}: {workload.name} has no port {port}"


def mounts(cluster: Cluster) -> Iterator[str]:
    """Each volume is mounted, each mount has a volume, and what they come from is there."""
    secrets = {c["spec"]["secretName"] for c in cluster.all("Certificate")}
    for workload in cluster.workloads:
        volumes = {v["name"]: v for v in workload.pod["volumes"]}
        mounted = [m["name"] for m in workload.container["volumeMounts"]]
        paths = [m["mountPath"] for m in workload.container["volumeMounts"]]
        for name in set(mounted) - set(volumes):
            yield f"{workload.name}: mounts {name}, which is no volume"
        for name in set(volumes) - set(mounted):
            yield f"{workload.name}: volume {name} is mounted nowhere"
        if len(set(paths)) < len(paths):
            yield f"{workload.name}: two volumes at one place"
        maps = [v["configMap"]["name"] for v in volumes.values() if "configMap" in v]
        maps += [e["configMapRef"]["name"] for e in workload.container.get("envFrom", [])]
        for name in maps:
            if not cluster.has("ConfigMap", name):
                yield f"{workload.name}: no ConfigMap {name}"
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and not cluster.has("PersistentVolumeClaim", claim):
                yield f"{workload.name}: no PersistentVolumeClaim {claim}"
            if "secret" in volume and volume["secret"]["secretName"] not in secrets:
                yield f"{workload.name}: no Secret {volume['secret']['secretName']}"
            attributes = volume.get("csi", {}).get("volumeAttributes", {})
            issuer = attributes.get("csi.cert-manager.io/issuer-name")
            if issuer and not cluster.has("Issuer", issuer):
                yield f"{workload.name}: no Issuer {issuer}"
        if not cluster.has("ServiceAccount", workload.pod["serviceAccountName"]):
            yield f"{workload.name}: no ServiceAccount {workload.pod['serviceAccountName']}"


def authorities(cluster: Cluster) -> Iterator[str]:
    """Certificates come from issuers that are there, and those from secrets that a certificate fills."""
    secrets = {c["spec"]["secretName"] for c in cluster.all("Certificate") if c["spec"].get("isCA")}
    for certificate in cluster.all("Certificate"):
        if not cluster.has("Issuer", certificate["spec"]["issuerRef"]["name"]):
            yield f"Certificate {certificate['metadata']['name']}: no issuer {certificate['spec']['issuerRef']['name']}"
    for issuer in cluster.all("Issuer"):
        if "ca" in issuer["spec"] and issuer["spec"]["ca"]["secretName"] not in secrets:
            yield f"Issuer {issuer['metadata']['name']}: no CA in secret {issuer['spec']['ca']['secretName']}"


def headless(cluster: Cluster) -> Iterator[str]:
    """The pods of a StatefulSet have names in DNS, ready or not."""
    for workload in cluster.workloads:
        if workload.object["kind"] != "StatefulSet":
            continue
        name = workload.object["spec"]["serviceName"]
        if not cluster.has("Service", name):
            yield f"{workload.name}: no Service {name}"
            continue
        spec = cluster.get("Service", name)["spec"]
        if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
            yield f"Service {name}: doesn't publish every pod's address"
        if workload not in cluster.selected(spec["selector"]):
            yield f"{workload.name}: Service {name} selects other pods"


def images(cluster: Cluster) -> Iterator[str]:
    """All pods run the same build, and it is this version."""
    found = {w.container["image"] for w in cluster.workloads}
    if len(found) != 1:
        yield f"more than one image: {sorted(found)}"
    for image in found:
        if image.rpartition(":")[2] != __version__:
            yield f"{image}: this is version {__version__}"


def namespaces(cluster: Cluster) -> Iterator[str]:
    """Everything is in one namespace, which is part of what is applied."""
    made = {o["metadata"]["name"] for o in cluster.all("Namespace")}
    used = {o["metadata"].get("namespace") for o in cluster.objects if o["kind"] not in CLUSTER_WIDE}
    if used != made or len(made) != 1:
        yield f"objects are in {used}, made are {made}"


def names(cluster: Cluster) -> Iterator[str]:
    """Two objects never have the same name and kind: the second would replace the first."""
    for a, b in combinations(cluster.objects, 2):
        if (a["kind"], a["metadata"]["name"]) == (b["kind"], b["metadata"]["name"]):
            yield f"{a['kind']} {a['metadata']['name']}: twice"


ALL = (selectors, ports, mounts, authorities, headless, images, namespaces, names)
