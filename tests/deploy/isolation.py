"""Checks of what pods may do, and who reaches them: each is a function from a cluster to complaints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.config import ServiceConfig
from pdkv.discovery.words import Slices, place_of
from tests.deploy.cluster import Cluster, Workload

LEVEL = "pod-security.kubernetes.io/enforce"
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SEES_ENDPOINTS = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
SEES_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
GRPC, METRICS, OTLP, UCX, UCX_LAST = 7000, 9400, 4317, 20000, 20999
SIDE, ENGINE_HTTP, ROUTER_HTTP, ROUTER_METRICS = 5600, 8000, 8080, 29000
"""Of vLLM's engines, and of its router."""


def unrestricted(workload: Workload) -> Iterator[str]:
    """What keeps a pod from Kubernetes' Pod Security Standard `restricted`."""
    pod, container = workload.pod, workload.container
    mine, its = pod.get("securityContext", {}), container.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for name, wanted in (("privileged", False), ("allowPrivilegeEscalation", False)):
        if its.get(name, name == "allowPrivilegeEscalation") is not wanted:
            yield name
    if its.get("runAsNonRoot", mine.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot"
    if its.get("runAsUser", mine.get("runAsUser")) == 0:
        yield "runAsUser 0"
    if its.get("seccompProfile", mine.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    capabilities = its.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities"
    yield from (f"capability {name}" for name in capabilities.get("add", []) if name != "NET_BIND_SERVICE")
    for volume in pod.get("volumes", []):
        yield from (f"volume {kind}" for kind in set(volume) - {"name"} - RESTRICTED_VOLUMES)
    if any("hostPort" in port for port in container["ports"]) or mine.get("sysctls"):
        yield "hostPort or sysctls"


def levels(cluster: Cluster) -> Iterator[str]:
    """A namespace enforces `restricted` unless a pod can't have it, and only for locked memory can't it."""
    excused = {"runAsNonRoot", "runAsUser 0", "capability IPC_LOCK"}
    found = {w.name: set(unrestricted(w)) for w in cluster.workloads}
    for name, why in found.items():
        if why not in (set(), excused):
            yield f"{name}: {sorted(why - excused) or sorted(why)}"
    wanted = "privileged" if any(found.values()) else "restricted"
    for namespace in cluster.all("Namespace"):
        if (level := namespace["metadata"].get("labels", {}).get(LEVEL)) != wanted:
            yield f"Namespace {namespace['metadata']['name']}: enforces {level}, can enforce {wanted}"


def rights(cluster: Cluster) -> Iterator[str]:
    """A token has who looks for nodes by the API, and may see those and nothing else; nothing writes to its own image
    or takes variables from services."""
    asking = {workload.name: SEES_ENDPOINTS for workload, _, config in cluster.configs() if _asks_the_api(config)}
    asking |= {w.name: SEES_PODS for w in cluster.workloads if "--service-discovery" in w.container["args"]}
    bindings = [b for b in cluster.all("RoleBinding") if cluster.has(b["roleRef"]["kind"], b["roleRef"]["name"])]
    bound = {subject["name"] for binding in bindings for subject in binding["subjects"]}
    for workload in cluster.workloads:
        asks = workload.name in asking
        if workload.pod.get("automountServiceAccountToken") is not asks:
            yield f"{workload.name}: has {'no' if asks else 'a'} token for the API server"
        if (workload.pod["serviceAccountName"] in bound) is not asks:
            yield f"{workload.name}: {'may not' if asks else 'may'} see endpoints"
        if workload.pod.get("enableServiceLinks") is not False:
            yield f"{workload.name}: gets variables of services"
        if workload.container["securityContext"].get("readOnlyRootFilesystem") is not True:
            yield f"{workload.name}: may write to its root"
    for found in cluster.all("Role", "ClusterRole", "ClusterRoleBinding"):
        if found["kind"] != "Role" or found.get("rules") not in asking.values():
            yield f"{found['kind']} {found['metadata']['name']}: a router asks nothing else of the API server"


def _asks_the_api(config: ServiceConfig) -> bool:
    words = (*getattr(config, "prefill_addresses", ()), *getattr(config, "decode_addresses", ()))
    return any(isinstance(place_of(word), Slices) for word in words)


def disruption(cluster: Cluster) -> Iterator[str]:
    """Of each role a machine can be emptied, and one pod is left."""
    for workload in cluster.workloads:
        budgets = [b for b in cluster.all("PodDisruptionBudget") if workload in cluster.selected(b["spec"]["selector"])]
        allowed = [b["spec"].get("maxUnavailable") for b in budgets]
        if len(allowed) != 1 or not isinstance(allowed[0], int) or not 1 <= allowed[0] < workload.replicas:
            yield f"{workload.name}: {workload.replicas} pods, of which {allowed} may go"


def spread(cluster: Cluster) -> Iterator[str]:
    """Pods of a role keep apart, and decode nodes near prefill nodes."""
    for workload in cluster.workloads:
        constraints = workload.pod.get("topologySpreadConstraints", [])
        if not any(c["topologyKey"] == "kubernetes.io/hostname" for c in constraints):
            yield f"{workload.name}: isn't spread over machines"
        if workload.role == "decode" and "podAffinity" not in workload.pod.get("affinity", {}):
            yield f"{workload.name}: may be far from prefill"


# --- network policies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """Somebody who calls or is called; outside the cluster without labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "elsewhere"
    ports: dict[str, int] = field(default_factory=dict)

    def matches(self, peer: dict[str, Any], home: str) -> bool:
        if self.namespace == "internet" or "ipBlock" in peer:
            return False
        spaces = peer.get("namespaceSelector")
        names = {"kubernetes.io/metadata.name": self.namespace}
        inside = self.namespace == home if spaces is None else spaces.get("matchLabels", {}).items() <= names.items()
        return inside and peer.get("podSelector", {}).get("matchLabels", {}).items() <= self.labels.items()


def reaches(cluster: Cluster, caller: End, called: End, port: int, protocol: str = "TCP") -> bool:
    """As Kubernetes reads policies: a pod that none selects is open; otherwise one has to allow it, at both ends."""
    return all(
        _lets(cluster, mine, other, direction, (port, protocol, called))
        for mine, other, direction in ((caller, called, "egress"), (called, caller, "ingress"))
    )


def _lets(cluster: Cluster, mine: End, other: End, direction: str, what: tuple[int, str, End]) -> bool:
    selecting = []
    for policy in cluster.all("NetworkPolicy"):
        home, spec = policy["metadata"].get("namespace", "default"), policy["spec"]
        inside = home == mine.namespace and spec["podSelector"].get("matchLabels", {}).items() <= mine.labels.items()
        if inside and direction.title() in spec["policyTypes"]:
            selecting.append((home, spec.get(direction, [])))
    if not selecting:
        return True
    key = "to" if direction == "egress" else "from"
    return any(
        (not rule.get(key) or any(other.matches(peer, home) for peer in rule[key]))
        and (not rule.get("ports") or any(_is_port(p, *what) for p in rule["ports"]))
        for home, rules in selecting
        for rule in rules
    )


def _is_port(allowed: dict[str, Any], port: int, protocol: str, called: End) -> bool:
    if allowed.get("protocol", "TCP") != protocol:
        return False
    first = called.ports.get(allowed["port"], -1) if isinstance(allowed["port"], str) else allowed["port"]
    return bool(first <= port <= allowed.get("endPort", first))


def _wanted(cluster: Cluster, names: Sequence[str]) -> set[tuple[str, str, int]]:
    """Who has to reach whom by TCP, at which port, beside UCX's."""
    pods = {w.name for w in cluster.workloads}
    engines = any("vllm serve" in word for w in cluster.workloads for word in w.container.get("command", ()))
    if engines:
        wanted = {("client", "router", ROUTER_HTTP), ("decode", "prefill", SIDE)}
        wanted |= {("router", role, ENGINE_HTTP) for role in ("prefill", "decode")}
    else:
        wanted = {("client", "router", port) for port in (GRPC, ROUTER_HTTP)}
        wanted |= {("router", "router", port) for port in (GRPC, ROUTER_HTTP)}
        wanted |= {("router", "prefill", GRPC), ("router", "decode", GRPC), ("decode", "prefill", GRPC)}
    wanted |= {(w.name, "collector", OTLP) for w, _, config in cluster.configs() if config.trace_endpoint}
    if any(cluster.all("Role")):
        wanted |= {("router", name, 443) for name in names if name not in pods}
    if any(cluster.all("PodMonitor")):
        at = {"prefill": ENGINE_HTTP, "decode": ENGINE_HTTP, "router": ROUTER_METRICS}
        wanted |= {("prometheus", name, at[name] if engines else METRICS) for name in pods}
    return wanted


def network(cluster: Cluster) -> Iterator[str]:
    """Whoever has to reach somebody can, and nobody else."""
    home = next((o["metadata"].get("namespace", "default") for o in cluster.all("NetworkPolicy")), "default")
    pods = {w.name: End(w.name, w.labels, home, w.ports) for w in cluster.workloads}
    dns = End("dns", {"k8s-app": "kube-dns"}, "kube-system")
    client = End("client", {"pdkv-client": "true"})
    prometheus = End("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
    collector = End("collector", {"app.kubernetes.io/name": "opentelemetry-collector"}, "observability")
    ends = [
        *pods.values(),
        dns,
        client,
        prometheus,
        collector,
        End("neighbour", {}, home),
        End("stranger"),
        End("internet", {}, "internet"),
    ]
    wanted = _wanted(cluster, [end.name for end in ends])
    for port in (UCX, UCX_LAST):
        wanted |= {("decode", "prefill", port), ("prefill", "decode", port)}
    looked_at = {GRPC, METRICS, OTLP, SIDE, ENGINE_HTTP, ROUTER_HTTP, ROUTER_METRICS, UCX, UCX_LAST, UCX_LAST + 1, 443}
    for caller in ends:
        for called in ends:
            for port in looked_at:
                ours = caller.name in pods or called.name in pods
                if ours and reaches(cluster, caller, called, port) is not ((caller.name, called.name, port) in wanted):
                    yield f"{caller.name} to {called.name}:{port}"
    for name, pod in pods.items():
        if not all(reaches(cluster, pod, dns, 53, protocol) for protocol in ("UDP", "TCP")):
            yield f"{name}: can't look up names"
    for workload in cluster.workloads:
        span = workload.environment(workload.pod_names[0]).get("UCX_TCP_PORT_RANGE")
        if workload.role in ("prefill", "decode") and span != f"{UCX}-{UCX_LAST}":
            yield f"{workload.name}: UCX listens outside of {UCX}-{UCX_LAST}"


ALL = (levels, rights, disruption, spread, network)
