"""Each check complains about a deployment that is wrong in the way that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import isolation, references, settings
from tests.deploy.cluster import Cluster, Object
from tests.deploy.test_overlays import CHECKS, VERSIONS, Check, built, invalid

Change = Callable[[Cluster], object]


def pod(cluster: Cluster, name: str = "decode") -> Object:
    return cluster.workload(name).pod


def container(cluster: Cluster, name: str = "decode") -> Object:
    found: Object = pod(cluster, name)["containers"][0]
    return found


def spec(cluster: Cluster, kind: str, name: str) -> Object:
    found: Object = cluster.get(kind, name)["spec"]
    return found


def configured(role: str, before: str, after: str) -> Change:
    """A change of the role's YAML."""

    def change(cluster: Cluster) -> None:
        (found,) = [m for m in cluster.all("ConfigMap") if m["metadata"]["name"].startswith(role)]
        assert before in found["data"]["config.yaml"]
        found["data"]["config.yaml"] = found["data"]["config.yaml"].replace(before, after)

    return change


def without(kind: str, name: str = "") -> Change:
    """An object, or all of a kind, that isn't there."""

    def change(cluster: Cluster) -> None:
        gone = [o for o in cluster.all(kind) if o["metadata"]["name"].startswith(name)]
        assert gone
        cluster.objects = [o for o in cluster.objects if o not in gone]

    return change


def variable(name: str, value: str, role: str = "decode") -> Change:
    def change(cluster: Cluster) -> None:
        environment = container(cluster, role)["env"]
        environment[:] = [e for e in environment if e["name"] != name] + [{"name": name, "value": value}]

    return change


def attribute(name: str, value: str, role: str) -> Change:
    def change(cluster: Cluster) -> None:
        (volume,) = [v for v in pod(cluster, role)["volumes"] if "csi" in v]
        volume["csi"]["volumeAttributes"][f"csi.cert-manager.io/{name}"] = value

    return change


def probe(kind: str, **fields: Any) -> Change:
    return lambda c: container(c)[f"{kind}Probe"].update(fields)


def first_first(cluster: Cluster) -> None:
    container(cluster)["env"].sort(key=lambda e: e["name"] != "PDKV_ADVERTISE")


WRONG: list[tuple[Check, str, Change, str]] = [
    (references.selectors, "cpu-demo", lambda c: c.workload("decode").labels.clear(), "doesn't select its own"),
    (
        references.selectors,
        "cpu-demo",
        lambda c: spec(c, "StatefulSet", "decode")["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
        "selects other pods too",
    ),
    (
        references.selectors,
        "cpu-demo",
        lambda c: spec(c, "Service", "decode")["selector"].update(a="b"),
        "not one role",
    ),
    (
        references.selectors,
        "cpu-demo",
        lambda c: spec(c, "NetworkPolicy", "decode")["podSelector"]["matchLabels"].update(a="b"),
        "selects nothing",
    ),
    (
        references.selectors,
        "cpu-demo",
        lambda c: pod(c)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"),
        "by the labels of others",
    ),
    (
        references.ports,
        "cpu-demo",
        lambda c: spec(c, "Service", "router")["ports"][0].update(targetPort="web"),
        "no port web",
    ),
    (references.ports, "cpu-demo", lambda c: container(c)["ports"].pop(0), "decode has no port 20000"),
    (references.mounts, "cpu-demo", lambda c: pod(c)["volumes"].pop(0), "which is no volume"),
    (references.mounts, "cpu-demo", lambda c: container(c)["volumeMounts"].pop(0), "is mounted nowhere"),
    (references.mounts, "cpu-demo", without("ConfigMap", "security"), "no ConfigMap security"),
    (references.mounts, "cpu-demo", without("ServiceAccount"), "no ServiceAccount"),
    (references.mounts, "mtls", without("Issuer", "fleet"), "no Issuer fleet"),
    (references.authorities, "mtls", without("Issuer", "self-signed"), "no issuer self-signed"),
    (references.authorities, "mtls", without("Certificate", "authority"), "no CA in secret"),
    (references.headless, "cpu-demo", without("Service", "decode"), "no Service decode"),
    (
        references.headless,
        "cpu-demo",
        lambda c: spec(c, "Service", "decode").pop("publishNotReadyAddresses"),
        "doesn't publish",
    ),
    (references.images, "cpu-demo", lambda c: container(c).update(image="pdkv:latest"), "more than one image"),
    (
        references.images,
        "cpu-demo",
        lambda c: [container(c, n).update(image="pdkv:0") for n in ("prefill", "decode", "router")],
        "this is version",
    ),
    (references.namespaces, "cpu-demo", without("Namespace"), "made are set()"),
    (references.names, "cpu-demo", lambda c: c.objects.append(c.objects[0]), "twice"),
    (settings.configs, "cpu-demo", configured("decode", "pool_bytes", "pool_byte"), "pool_byte"),
    (settings.configs, "cpu-demo", configured("router", "on_failure: retry", "on_failure: pray"), "on_failure"),
    (settings.configs, "cpu-demo", variable("PDKV_ROUTER_SERVICE_HOST", "10.0.0.1"), "PDKV_ROUTER_SERVICE_HOST"),
    (settings.configs, "cpu-demo", lambda c: container(c)["args"].__setitem__(2, "/etc/pdkv/other"), "other"),
    (settings.configs, "mtls", configured("decode", "threads:", "insecure: true\nthreads:"), "plain text"),
    (
        settings.addresses,
        "cpu-demo",
        configured("router", "dns:_grpc._tcp.decode", "decode-0.decode:7000"),
        "lacks decode-1",
    ),
    (
        settings.addresses,
        "cpu-demo",
        configured("router", "dns:_grpc._tcp.prefill", "prefill-9.prefill:7000"),
        "has prefill-9",
    ),
    (
        settings.addresses,
        "cpu-demo",
        configured("decode", "_grpc._tcp.prefill", "_http._tcp.prefill"),
        "lacks prefill-0",
    ),
    (
        settings.addresses,
        "cpu-demo",
        configured("decode", "_grpc._tcp.prefill", "_grpc._udp.prefill"),
        "lacks prefill-0",
    ),
    (
        settings.addresses,
        "cpu-demo",
        configured("decode", "_grpc._tcp.prefill", "_grpc._tcp.router"),
        "lacks prefill-0",
    ),
    (
        settings.addresses,
        "cpu-demo",
        configured("decode", "_grpc._tcp.prefill", "_grpc._tcp.nobody"),
        "lacks prefill-0",
    ),
    (settings.addresses, "cpu-demo", configured("decode", '"prefill-*.prefill:7000"', ""), "prefill_allow"),
    (settings.addresses, "cpu-demo", configured("prefill", "0.0.0.0:7000", "0.0.0.0:7001"), "its port grpc is"),
    (settings.addresses, "cpu-demo", configured("router", "0.0.0.0:8080", "0.0.0.0:8081"), "its port http is"),
    (settings.addresses, "cpu-demo", first_first, "nothing in DNS leads from $(PDKV_NODE_ID)"),
    (settings.addresses, "cpu-demo", lambda c: spec(c, "StatefulSet", "decode").update(serviceName="d"), "in DNS"),
    (settings.grace, "cpu-demo", configured("decode", "drain_grace_s: 120", "drain_grace_s: 135"), "is killed after"),
    (
        settings.grace,
        "cpu-demo",
        lambda c: container(c, "router")["lifecycle"]["preStop"]["exec"].update(command=["sleep", "60"]),
        "is killed after",
    ),
    (
        settings.grace,
        "cpu-demo",
        configured("router", "bind: 0.0.0.0:7000", "bind: 0.0.0.0:7000\nconnection_age_s: 25"),
        "has clients",
    ),
    (
        settings.grace,
        "cpu-demo",
        lambda c: container(c, "router")["lifecycle"]["preStop"]["exec"].update(command=["pdkv", "drain"]),
        "how long",
    ),
    (settings.probes, "cpu-demo", lambda c: container(c).pop("startupProbe"), "lacks a probe"),
    (settings.probes, "cpu-demo", probe("liveness", grpc={"port": 7000}), "asks"),
    (settings.probes, "cpu-demo", probe("readiness", grpc={"port": 7001}), "port 7001 isn't served"),
    (settings.probes, "cpu-demo", probe("liveness", failureThreshold=1), "too early"),
    (settings.probes, "mtls", probe("readiness", exec={"command": ["pdkv", "status"]}), "not pdkv health"),
    (
        settings.probes,
        "mtls",
        lambda c: (
            container(c)["livenessProbe"].pop("exec") and probe("liveness", grpc={"port": 7000, "service": "live"})(c)
        ),
        "has no certificate",
    ),
    (settings.resources, "cpu-demo", configured("decode", "256MiB", "1GiB"), "memory 1536Mi is less than"),
    (settings.resources, "cpu-demo", configured("decode", "on_failure", "preempt: offload\non_failure"), "memory"),
    (settings.resources, "rdma", configured("decode", "57GB", "58GB"), "hugepages-2Mi 54Gi is less than"),
    (settings.resources, "rdma", configured("decode", "hugetlb", "anonymous"), "memory 8Gi is less than"),
    (settings.certificates, "mtls", variable("PDKV_NODE_ID", "d0"), "lacks d0"),
    (settings.certificates, "mtls", attribute("dns-names", "${POD_NAME}", "decode"), "lacks decode-0.decode"),
    (settings.certificates, "mtls", attribute("dns-names", "router.pdkv", "router"), "refuses ('router.pdkv',)"),
    (settings.certificates, "mtls", variable("PDKV_ALLOW_NAMES", "decode", "prefill"), "refuses ('decode-0'"),
    (settings.certificates, "mtls", variable("PDKV_TLS_KEY", "/etc/pdkv-tls/key.pem"), "puts no"),
    (settings.certificates, "mtls", variable("PDKV_ALLOW_ADMIN", ""), "no admin"),
    (isolation.levels, "cpu-demo", lambda c: pod(c).update(hostNetwork=True), "hostNetwork"),
    (
        isolation.levels,
        "cpu-demo",
        lambda c: container(c)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "SYS_ADMIN",
    ),
    (
        isolation.levels,
        "cpu-demo",
        lambda c: pod(c)["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        "volume hostPath",
    ),
    (isolation.levels, "cpu-demo", lambda c: pod(c)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    (
        isolation.levels,
        "cpu-demo",
        lambda c: c.get("Namespace", "pdkv")["metadata"]["labels"].update({isolation.LEVEL: "baseline"}),
        "enforces baseline",
    ),
    (isolation.rights, "cpu-demo", lambda c: pod(c).pop("automountServiceAccountToken"), "token"),
    (isolation.rights, "cpu-demo", lambda c: pod(c).pop("enableServiceLinks"), "variables of services"),
    (
        isolation.rights,
        "cpu-demo",
        lambda c: container(c)["securityContext"].pop("readOnlyRootFilesystem"),
        "write to its root",
    ),
    (isolation.rights, "cpu-demo", lambda c: c.objects.append({"kind": "Role", "metadata": {"name": "r"}}), "Role r"),
    (isolation.disruption, "cpu-demo", without("PodDisruptionBudget", "decode"), "of which []"),
    (isolation.disruption, "cpu-demo", lambda c: spec(c, "StatefulSet", "decode").update(replicas=1), "of which [1]"),
    (isolation.spread, "cpu-demo", lambda c: pod(c).pop("topologySpreadConstraints"), "isn't spread"),
    (isolation.spread, "cpu-demo", lambda c: pod(c).pop("affinity"), "far from prefill"),
    (isolation.network, "cpu-demo", without("NetworkPolicy"), "stranger to prefill:7000"),
    (isolation.network, "cpu-demo", without("NetworkPolicy", "every-pod"), "prefill to internet:443"),
    (isolation.network, "cpu-demo", without("NetworkPolicy", "prefill"), "decode to prefill:20000"),
    (
        isolation.network,
        "cpu-demo",
        lambda c: spec(c, "NetworkPolicy", "every-pod")["egress"].pop(0),
        "can't look up names",
    ),
    (
        isolation.network,
        "cpu-demo",
        lambda c: spec(c, "NetworkPolicy", "decode")["ingress"][1]["ports"][0].pop("endPort"),
        "prefill to decode:20999",
    ),
    (
        isolation.network,
        "cpu-demo",
        lambda c: spec(c, "NetworkPolicy", "router")["ingress"][0]["from"].append({"podSelector": {}}),
        "neighbour to router:7000",
    ),
    (isolation.network, "cpu-demo", variable("UCX_TCP_PORT_RANGE", "0"), "UCX listens outside"),
    (
        isolation.network,
        "cpu-demo",
        variable("PDKV_TRACE_ENDPOINT", "http://otel-collector.observability:4317"),
        "decode to collector:4317",
    ),
]


@pytest.mark.parametrize(("check", "overlay", "change", "words"), WRONG)
def test_it_is_found(check: Check, overlay: str, change: Change, words: str) -> None:
    cluster = built(overlay)
    change(cluster)
    complaints = list(check(cluster))
    assert any(words in complaint for complaint in complaints), complaints


def test_each_check_has_a_control() -> None:
    assert {check for check, *_ in WRONG} == set(CHECKS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("overlay", "kind", "name", "key", "words"),
    [
        ("cpu-demo", "StatefulSet", "decode", "replica", "replica"),
        ("cpu-demo", "Service", "router", "Selector", "Selector"),
        ("mtls", "Certificate", "admin", "dnsName", "is known"),
    ],
)
def test_a_field_that_nobody_knows_is_found(
    version: str, overlay: str, kind: str, name: str, key: str, words: str
) -> None:
    found = built(overlay).get(kind, name)
    assert not invalid(found, version)
    found["spec"][key] = "1"
    assert words in invalid(found, version)


def test_a_field_that_came_later_is_found_by_the_old_schema_only() -> None:
    """So the old one is a schema of its own, and the new one is new."""
    found = built("cpu-demo").get("Deployment", "router")
    found["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"] = {"sleep": {"seconds": 5}}
    assert [bool(invalid(found, version)) for version in VERSIONS] == [True, False]
