"""Checks of pods against what their processes would really do: each is a function from a cluster to complaints."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from typer.main import get_command

from pdkv.cli.app import app
from pdkv.cli.serve import LAST_WORDS_S
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig, ServiceConfig
from pdkv.discovery.words import Hosts, Services, place_of
from pdkv.errors import ConfigError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.rpc.health import LIVE
from tests.deploy.cluster import CSI_FILES, Cluster, Workload

ENDING_S = 5
"""For agents and process to go, beyond all that is waited for by name."""
UNHEARD_S = 5
"""Until every machine has heard that a pod of a Service ends, and sends it no new connection."""
PROCESS_BYTES = 1 << 30
"""What a node takes beside its pool, with the tiny model or with none: torch, UCX, messages."""
ROUTER_BYTES = 256 << 20
HUGE_PAGE = 2 << 20
LOADING_S = 300
"""A startup probe gives a node as long to load."""
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def quantity(text: str) -> float:
    """Of memory or CPU, as Kubernetes writes it."""
    if text[-2:] in _UNITS:
        return float(text[:-2]) * _UNITS[text[-2:]]
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def configs(cluster: Cluster) -> Iterator[str]:
    """What a process would read is a config: every key and variable exists, every value can be used."""
    for workload in cluster.workloads:
        for pod in workload.pod_names:
            try:
                workload.config(pod)
            except (ConfigError, KeyError) as error:
                yield f"{pod}: {error}"


def addresses(cluster: Cluster) -> Iterator[str]:
    """Every node is known to those who dial it, by the name that it gives itself; and nobody else is."""
    said: dict[type[ServiceConfig], set[str]] = {PrefillConfig: set(), DecodeConfig: set()}
    for workload, pod, config in cluster.configs():
        host, _, port = config.advertise.rpartition(":")
        if not any(host == name and int(port) in ports for name, ports in _dialled(cluster, workload, pod)):
            yield f"{pod}: nothing in DNS leads from {config.advertise} to it"
        binds = [(config.bind, "grpc"), (config.metrics_bind, "metrics")]
        if isinstance(config, RouterConfig):
            binds.append((config.http_bind, "http"))
        for bound, port in binds:
            if bound != f"0.0.0.0:{workload.ports[port]}":
                yield f"{pod}: binds {bound}, its port {port} is {workload.ports[port]}"
        said.setdefault(type(config), set()).add(config.advertise)
    for _, pod, config in cluster.configs():
        for dialled, role in (("prefill_addresses", PrefillConfig), ("decode_addresses", DecodeConfig)):
            words = getattr(config, dialled, None)
            known = said[role] if words is None else {each for word in words for each in _found(cluster, word)}
            for address in sorted(known ^ said[role]):
                yield f"{pod}: {dialled} {'lacks' if address in said[role] else 'has'} {address}"
        allowed = getattr(config, "prefill_allow", ("*",))
        for address in said[PrefillConfig]:
            if not any(fnmatchcase(address, pattern) for pattern in allowed):
                yield f"{pod}: prefill_allow doesn't let a router name {address}"


def _found(cluster: Cluster, word: str) -> set[str]:
    """Where an address, or a place, leads to, as DNS and the API server of a cluster have it: every pod of a headless
    Service that says its pods' addresses, ready or not, at the port of that name."""
    place = place_of(word)
    if place is None:
        return {word}
    if isinstance(place, Hosts):
        raise ConfigError("addresses", word, "a place that brings names, for certificates")
    if isinstance(place, Services):
        port, protocol, name = place.name.split(".", 2)
        port, protocol = port.removeprefix("_"), protocol.removeprefix("_").upper()
    else:
        port, protocol, name = place.port, "TCP", place.service
    if not cluster.has("Service", name):
        return set()
    spec = cluster.get("Service", name)["spec"]
    targets = [p["targetPort"] for p in spec["ports"] if (p["name"], p.get("protocol", "TCP")) == (port, protocol)]
    if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
        return set()
    return {
        f"{pod}.{name}:{workload.ports[target]}"
        for workload in cluster.selected(spec["selector"])
        for pod in workload.pod_names
        for target in targets
    }


def _dialled(cluster: Cluster, workload: Workload, pod: str) -> Iterator[tuple[str, set[int]]]:
    """Hosts that lead to the pod, and the ports that are open there."""
    for service in cluster.all("Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        if workload not in cluster.selected(spec["selector"]):
            continue
        if spec.get("clusterIP") == "None":
            if workload.object["spec"].get("serviceName") == name:
                yield f"{pod}.{name}", set(workload.ports.values())
        else:
            yield name, {p["port"] for p in spec["ports"]}


def grace(cluster: Cluster) -> Iterator[str]:
    """Kubernetes waits longer than the process needs to let its requests end; a router is told to end when its clients
    have gone elsewhere: gRPC ends a connection up to a tenth later than its age."""
    for workload, pod, config in cluster.configs():
        hook = workload.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        if hook[:1] != ["sleep"]:
            yield f"{pod}: how long does preStop take? {hook}"
            continue
        if isinstance(config, RouterConfig) and float(hook[1]) < UNHEARD_S + 1.1 * config.connection_age_s:
            yield f"{pod}: has clients when it is told to end: connections live for {config.connection_age_s:g} s"
        needed = float(hook[1]) + config.drain_grace_s + LAST_WORDS_S + ENDING_S
        if (given := workload.pod["terminationGracePeriodSeconds"]) < needed:
            yield f"{pod}: is killed after {given} s and may need {needed:g} s"


def probes(cluster: Cluster) -> Iterator[str]:
    """They ask the process that runs there, three different things, and patience grows with what is at stake."""
    for workload, pod, config in cluster.configs():
        found = {kind: workload.container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        if not all(found.values()):
            yield f"{pod}: lacks a probe"
            continue
        asked = {}
        for kind, probe in found.items():
            try:
                asked[kind] = asks(probe, workload, config)
            except ValueError as error:
                yield f"{pod}: {kind}: {error}"
        if len(asked) == 3 and list(asked.values()) != [LIVE, "", LIVE]:
            yield f"{pod}: asks {asked}"
        patience = {kind: probe["periodSeconds"] * probe.get("failureThreshold", 3) for kind, probe in found.items()}
        if patience["startup"] < LOADING_S or patience["liveness"] < 3 * patience["readiness"]:
            yield f"{pod}: gives up too early: {patience}"


def asks(probe: dict[str, Any], workload: Workload, config: ServiceConfig) -> str:
    """Which health service is asked. Raises `ValueError` if none is, or none there."""
    if "exec" in probe:
        command = probe["exec"]["command"]
        if command[:2] != ["pdkv", "health"]:
            raise ValueError(f"not pdkv health: {command}")
        health = get_command(app).commands["health"]  # type: ignore[attr-defined]
        given = health.make_context("health", list(command[2:])).params
        if given["address"]:
            raise ValueError("names an address instead of its own pod")
        return LIVE if given["live"] else ""
    if config.tls_ca:
        raise ValueError("a probe of Kubernetes' own has no certificate")
    if probe["grpc"]["port"] != workload.ports["grpc"]:
        raise ValueError(f"port {probe['grpc']['port']} isn't served")
    return str(probe["grpc"].get("service", ""))


def resources(cluster: Cluster) -> Iterator[str]:
    """What is planned fits into what is asked for: the pool, by the same arithmetic as `pdkv plan`, and the rest."""
    for workload, pod, config in cluster.configs():
        asked, limits = (workload.container["resources"][k] for k in ("requests", "limits"))
        if asked.get("memory") != limits.get("memory") or "cpu" not in asked:
            yield f"{pod}: memory isn't guaranteed, or no CPU is asked for"
        anonymous, huge = ROUTER_BYTES, 0
        if isinstance(config, NodeConfig):
            anonymous = PROCESS_BYTES
            if config.memory == "hugetlb":
                huge = -(-pool_bytes(config) // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
            elif config.device == "cpu":
                anonymous += pool_bytes(config)
        if isinstance(config, DecodeConfig) and config.preempt == "offload":
            anonymous += config.offload_bytes
        for name, needed in (("memory", anonymous), ("hugepages-2Mi", huge)):
            if quantity(limits.get(name, "0")) < needed:
                yield f"{pod}: {name} {limits.get(name)} is less than {needed:,} B"


def pool_bytes(config: NodeConfig) -> int:
    fmt = page_format(model_shape(load_config(config.model)), main_row=config.main_row)
    return config.total_pages(fmt.page_bytes) * fmt.page_bytes


def certificates(cluster: Cluster) -> Iterator[str]:
    """Either everybody is in plain text, or each pod has a certificate with the names it goes by, and those who call
    are let in."""
    found = list(cluster.configs())
    callers: dict[type[ServiceConfig], list[tuple[str, ...]]] = {}
    for workload, pod, config in found:
        names = workload.dns_names(pod)
        callers.setdefault(type(config), []).append(names)
        if config.insecure:
            if names:
                yield f"{pod}: has a certificate and talks in plain text"
            continue
        for path in (config.tls_certificate, config.tls_key, config.tls_ca):
            try:
                volume, name = workload.volume_at(path)
            except KeyError:
                yield f"{pod}: no volume has {path or 'its key files'}"
                continue
            if "csi" not in volume or name not in CSI_FILES:
                yield f"{pod}: cert-manager puts no {path}"
        for name in (config.node_id, config.advertise.rpartition(":")[0]):
            if name not in names:
                yield f"{pod}: its certificate lacks {name}"
        if not config.allow_admin or (not config.allow_names and not isinstance(config, RouterConfig)):
            yield f"{pod}: lets everybody, or no admin, in"
    if len({config.insecure for _, _, config in found}) > 1:
        yield "some are in plain text and some are not"
    for caller, called, kind in (
        (DecodeConfig, PrefillConfig, "allow_names"),
        (RouterConfig, PrefillConfig, "allow_status"),
        (RouterConfig, DecodeConfig, "allow_names"),
    ):
        for _, pod, config in found:
            patterns = getattr(config, kind)
            if not isinstance(config, called) or config.insecure:
                continue
            for names in callers.get(caller, []):
                if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                    yield f"{pod}: {kind} {patterns} refuses {names}"


ALL = (configs, addresses, grace, probes, resources, certificates)
