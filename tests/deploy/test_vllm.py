"""The overlay of vLLM's engines is what Kubernetes takes, agrees with itself, and with what its processes would do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy import isolation, references, vllm
from tests.deploy.cluster import K8S, Cluster
from tests.deploy.test_controls import container, pod, spec, without
from tests.deploy.test_overlays import VERSIONS, Check, built, invalid

Change = Callable[[Cluster], object]
CHECKS: list[Check] = [c for c in references.ALL if c is not references.images]
CHECKS += [*isolation.ALL, *vllm.ALL]


def with_monitoring(folder: Path) -> Cluster:
    """As docs/deploy.md writes it."""
    to = {name: os.path.relpath(K8S / name, folder.resolve()) for name in ("overlays", "components")}
    kustomization = {
        "namespace": "pdkv",
        "resources": [f"{to['overlays']}/vllm"],
        "components": [f"{to['components']}/monitoring-vllm"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), "utf-8")
    return Cluster.of(folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str, tmp_path: Path) -> None:
    objects = with_monitoring(tmp_path).objects
    assert [(o["kind"], o["metadata"]["name"], why) for o in objects if (why := invalid(o, version))] == []
    assert {"Deployment", "PersistentVolumeClaim", "PodMonitor", "PrometheusRule"} <= {o["kind"] for o in objects}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.__module__}.{check.__name__}")
def test_it_agrees_with_itself(check: Check, tmp_path: Path) -> None:
    assert list(check(built("vllm"))) == []
    assert list(check(with_monitoring(tmp_path))) == []


def test_only_engines_are_unrestricted_and_for_locked_memory_only() -> None:
    found = {w.name: set(isolation.unrestricted(w)) for w in built("vllm").workloads}
    locked = {"runAsNonRoot", "runAsUser 0", "capability IPC_LOCK"}
    assert found == {"prefill": locked, "decode": locked, "router": set()}
    plain = Cluster.of(K8S / "vllm")
    assert not any(list(isolation.unrestricted(w)) for w in plain.workloads)


def told(role: str, **changes: object) -> Change:
    """Entries of the argument of --kv-transfer-config; those of the connector's own by their name."""

    def change(cluster: Cluster) -> None:
        arguments = container(cluster, role)["args"]
        transfer = json.loads(arguments[-1])
        for name, value in changes.items():
            (transfer if name.startswith("kv_") else transfer["kv_connector_extra_config"])[name] = value
        arguments[-1] = json.dumps(transfer)

    return change


def configured(before: str, after: str) -> Change:
    """The file that both roles read."""

    def change(cluster: Cluster) -> None:
        (found,) = cluster.all("ConfigMap")
        assert before in found["data"]["engine.yaml"]
        found["data"]["engine.yaml"] = found["data"]["engine.yaml"].replace(before, after)

    return change


def argument(before: str, after: str, role: str = "router") -> Change:
    def change(cluster: Cluster) -> None:
        arguments = container(cluster, role)["args"]
        arguments[arguments.index(before)] = after

    return change


def probe(role: str, kind: str, **fields: object) -> Change:
    return lambda c: container(c, role)[f"{kind}Probe"].update(fields)


def variable(name: str, value: str, role: str = "decode") -> Change:
    def change(cluster: Cluster) -> None:
        environment = container(cluster, role)["env"]
        environment[:] = [e for e in environment if e["name"] != name] + [{"name": name, "value": value}]

    return change


def limit(name: str, value: str) -> Change:
    return lambda c: container(c)["resources"]["limits"].update({name: value})


SCRIPT = "pdkv doctor prefill --alone --require-rdma --device cuda:0; " + vllm.SERVES
WRONG: list[tuple[Check, Change, str]] = [
    (references.mounts, without("PersistentVolumeClaim"), "no PersistentVolumeClaim weights"),
    (references.mounts, without("ServiceAccount", "engine"), "no ServiceAccount engine"),
    (
        references.selectors,
        lambda c: spec(c, "Deployment", "decode")["selector"].update(matchLabels={}),
        "other pods too",
    ),
    (references.ports, lambda c: container(c, "prefill")["ports"].pop(1), "prefill has no port side"),
    (
        references.authorities,
        lambda c: c.objects.append({"kind": "Issuer", "metadata": {"name": "i"}, "spec": {"ca": {"secretName": "s"}}}),
        "no CA",
    ),
    (references.namespaces, without("Namespace"), "made are set()"),
    (references.names, lambda c: c.objects.append(c.objects[0]), "twice"),
    (isolation.levels, lambda c: pod(c).update(hostIPC=True), "hostIPC"),
    (isolation.rights, lambda c: c.get("Role", "router")["rules"][0]["verbs"].append("get"), "asks nothing else"),
    (isolation.rights, lambda c: container(c, "router")["args"].remove("--service-discovery"), "a token"),
    (isolation.rights, without("RoleBinding"), "may not see"),
    (isolation.rights, lambda c: pod(c).update(automountServiceAccountToken=True), "decode: has a token"),
    (isolation.disruption, without("PodDisruptionBudget", "decode"), "of which []"),
    (isolation.spread, lambda c: pod(c).pop("affinity"), "far from prefill"),
    (isolation.network, without("NetworkPolicy"), "stranger to prefill:5600"),
    (isolation.network, without("NetworkPolicy", "every-pod"), "decode to internet:443"),
    (isolation.network, lambda c: spec(c, "NetworkPolicy", "prefill")["ingress"].pop(1), "decode to prefill:5600"),
    (isolation.network, lambda c: spec(c, "NetworkPolicy", "router").pop("egress"), "router to internet:443"),
    (isolation.network, variable("UCX_TCP_PORT_RANGE", "0"), "UCX listens outside"),
    (vllm.configs, told("prefill", holds_s=1), "holds_s"),
    (vllm.configs, told("prefill", hold_s="long"), "hold_s"),
    (vllm.configs, told("decode", kv_role="kv_producer"), "is told to be kv_producer"),
    (vllm.configs, told("decode", kv_connector="NixlConnector"), "no connector of ours"),
    (vllm.configs, told("decode", kv_load_failure_policy="fail"), "fails requests"),
    (vllm.configs, configured("model: /weights", "model: /models"), "nothing is mounted"),
    (vllm.configs, variable("VLLM_NIXL_SIDE_CHANNEL_PORT", "side"), "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    (vllm.configs, without("Deployment", "decode"), "not an engine of each role"),
    (vllm.configs, argument("--config", "--config=", role="decode"), "other arguments"),
    (vllm.configs, lambda c: container(c)["args"].append("--dtype=float16"), "decode: "),
    (vllm.pairs, told("decode", require_rdma=False), "differ in require_rdma"),
    (vllm.pairs, told("decode", shadow=True), "differ in shadow"),
    (vllm.pairs, lambda c: container(c).update(image="vllm-pdkv:0.32.1-0.1.0"), "different images"),
    (vllm.addresses, variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"), "at localhost"),
    (vllm.addresses, variable("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601"), "its port side is 5600"),
    (vllm.addresses, configured("port: 8000", "port: 8001"), "its port http is 8000"),
    (vllm.addresses, told("decode", allow="10.1.*:5600"), "may not be sent to"),
    (
        vllm.addresses,
        argument("app.kubernetes.io/component=prefill", "app.kubernetes.io/component=decode"),
        "for prefill",
    ),
    (vllm.addresses, argument("--service-discovery-port=8000", "--service-discovery-port=80"), "look for it at"),
    (
        vllm.addresses,
        argument("--service-discovery-namespace=$(POD_NAMESPACE)", "--service-discovery-namespace=x"),
        "look in",
    ),
    (vllm.addresses, argument("--port=8080", "--port=8081"), "routers bind"),
    (vllm.addresses, argument("--host=0.0.0.0", "--host=127.0.0.1"), "own pod only"),
    (vllm.grace, configured("shutdown-timeout: 120", "shutdown-timeout: 145"), "is killed after"),
    (vllm.grace, told("prefill", hold_s=480), "promises prompts for hold_s 480"),
    (vllm.grace, told("prefill", lease_s=130), "promises prompts for lease_s 130"),
    (
        vllm.grace,
        lambda c: container(c)["lifecycle"]["preStop"]["exec"].update(command=["sleep", "1"]),
        "when it is told",
    ),
    (vllm.probes, lambda c: container(c).pop("startupProbe"), "lacks a probe"),
    (
        vllm.probes,
        probe("decode", "readiness", exec={"command": ["sh", "-ec", "curl -sSf http://localhost:8000/health"]}),
        "ask pdkv health",
    ),
    (vllm.probes, probe("decode", "readiness", exec={"command": ["sh", "-ec", "pdkv health"]}), "doesn't ask http"),
    (vllm.probes, probe("decode", "liveness", httpGet={"path": "/metrics", "port": "http"}), "liveness asks"),
    (vllm.probes, probe("router", "readiness", httpGet={"path": "/liveness", "port": "http"}), "readiness asks"),
    (vllm.probes, probe("decode", "liveness", failureThreshold=1), "too early"),
    (vllm.preflight, lambda c: container(c).update(command=["vllm", "serve", "", ""]), "without a look"),
    (vllm.preflight, lambda c: container(c)["command"].__setitem__(2, SCRIPT.replace("exec ", "")), "without a look"),
    (
        vllm.preflight,
        lambda c: container(c)["command"].__setitem__(2, SCRIPT.replace("--require-rdma ", "")),
        "looks for RDMA",
    ),
    (vllm.resources, limit(vllm.GPU, "8"), "8 GPUs for 1"),
    (vllm.resources, configured("tensor-parallel-size: 1", "tensor-parallel-size: 2"), "1 GPUs for 2"),
    (vllm.resources, lambda c: container(c)["resources"]["limits"].pop("rdma/hca_shared_devices_a"), "has no NIC"),
    (vllm.resources, lambda c: container(c)["resources"]["requests"].pop("memory"), "isn't guaranteed"),
    (vllm.resources, limit("memory", "8Gi"), "/dev/shm"),
    (vllm.images, lambda c: container(c).update(image="vllm-pdkv:0.33.0-0.1.0"), "isn't one of"),
    (vllm.images, lambda c: container(c).update(image="vllm-pdkv:latest"), "isn't one of"),
    (vllm.images, lambda c: container(c, "router").update(image="vllm-router:latest"), "isn't the router"),
]


@pytest.mark.parametrize(("check", "change", "words"), WRONG)
def test_it_is_found(check: Check, change: Change, words: str) -> None:
    cluster = built("vllm")
    change(cluster)
    complaints = list(check(cluster))
    assert any(words in complaint for complaint in complaints), complaints


def test_each_check_has_a_control() -> None:
    """But for that of StatefulSets' names: there are none here."""
    assert {check for check, *_ in WRONG} == set(CHECKS) - {references.headless}


def test_metrics_are_reached_by_prometheus_only_and_by_their_ports(tmp_path: Path) -> None:
    cluster = with_monitoring(tmp_path)
    cluster.get("PodMonitor", "router")["spec"]["podMetricsEndpoints"][0]["port"] = "side"
    cluster.objects.remove(cluster.get("NetworkPolicy", "metrics-decode"))
    assert "router has no port side" in " ".join(references.ports(cluster))
    assert "prometheus to decode:8000" in " ".join(isolation.network(cluster))
