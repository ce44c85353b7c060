"""Checks of vLLM's pods against what vLLM, pdkv's connector and vLLM's router would really do: each is a function from
a cluster to complaints.

The connector's settings are read by the connector's own code; vLLM itself isn't in this environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

import yaml

from pdkv import __version__
from pdkv.adapters.vllm.facts import SUPPORTED
from pdkv.adapters.vllm.settings import Settings, settings_of
from pdkv.errors import ConfigError
from tests.deploy.cluster import POD_IP, Cluster, Workload
from tests.deploy.settings import ENDING_S, LOADING_S, UNHEARD_S, quantity

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
SERVES = 'exec vllm serve "$@"'
ROUTER = "vllm-router"
NIC, GPU = re.compile(r"^rdma/"), "nvidia.com/gpu"


@dataclass(frozen=True)
class Engine:
    """What the process in a pod is told."""

    workload: Workload
    config: dict[str, Any]
    """The file that `vllm serve --config` reads."""
    transfer: dict[str, Any]
    """The argument of `--kv-transfer-config`."""
    settings: Settings


def engine_of(workload: Workload) -> Engine:
    """Raises `ConfigError`, `KeyError`, `ValueError`. vLLM overlooks a file that is given as `--config=FILE`."""
    (name, path, flag, transfer) = workload.container["args"]
    if (name, flag) != ("--config", "--kv-transfer-config"):
        raise ValueError(f"other arguments than the file and the connector: {workload.container['args']}")
    told = json.loads(transfer)
    settings = settings_of(told.get("kv_connector_extra_config", {}), workload.environment(workload.pod_names[0]))
    return Engine(workload, yaml.safe_load(workload.file_at(path)), told, settings)


def engines(cluster: Cluster) -> list[Engine]:
    """Of all pods whose settings are good."""
    found = []
    for workload in cluster.workloads:
        if workload.role in ROLES:
            try:
                found.append(engine_of(workload))
            except (ConfigError, KeyError, ValueError):
                continue
    return found


def router_of(cluster: Cluster) -> dict[str, list[str]]:
    """The options of vLLM's router, with what follows each."""
    (workload,) = [w for w in cluster.workloads if w.role == "router"]
    environment = workload.environment(workload.pod_names[0])
    options: dict[str, list[str]] = {}
    for word in workload.container["args"]:
        word = re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)
        name, _, value = word.partition("=")
        if word.startswith("--"):
            options[name] = [value] if value else []
        else:
            options[list(options)[-1]].append(word)
    return options


def configs(cluster: Cluster) -> Iterator[str]:
    """Each role is there, with the connector and settings that it takes."""
    for role, kv_role in ROLES.items():
        for workload in [w for w in cluster.workloads if w.role == role]:
            try:
                engine = engine_of(workload)
            except (ConfigError, KeyError, ValueError) as error:
                yield f"{workload.name}: {error}"
                continue
            named = (engine.transfer.get("kv_connector"), engine.transfer.get("kv_connector_module_path"))
            if named != ("PdkvConnector", "pdkv.adapters.vllm"):
                yield f"{workload.name}: no connector of ours: {named}"
            if engine.transfer.get("kv_role") != kv_role:
                yield f"{workload.name}: is told to be {engine.transfer.get('kv_role')}"
            try:
                workload.volume_at(f"{engine.config['model']}/config.json")
            except KeyError:
                yield f"{workload.name}: nothing is mounted at its model {engine.config.get('model')}"
    if sorted({e.workload.role for e in engines(cluster)}) != sorted(ROLES):
        yield "not an engine of each role"
    if any(
        e.transfer.get("kv_load_failure_policy") != "recompute" for e in engines(cluster) if e.workload.role == "decode"
    ):
        yield "a decode engine fails requests whose prompt it can't fetch"


def pairs(cluster: Cluster) -> Iterator[str]:
    """What has to be equal for two engines to be paired is one file, and the rest is."""
    found = engines(cluster)
    for name in ("require_rdma", "shadow", "weights_id", "backend", "tls_ca"):
        if len({getattr(e.settings, name) for e in found}) > 1:
            yield f"engines differ in {name}"
    if len({e.workload.volume_at("/etc/vllm/engine.yaml")[0]["configMap"]["name"] for e in found}) > 1:
        yield "engines read different files"
    if len({e.workload.container["image"] for e in found}) > 1:
        yield "engines are of different images"


def addresses(cluster: Cluster) -> Iterator[str]:
    """An engine is reached where it says that it is, and routers find exactly the engines of either role."""
    found, options = engines(cluster), router_of(cluster)
    for engine in found:
        name, ports = engine.workload.name, engine.workload.ports
        if (engine.settings.host, engine.settings.bind) != (POD_IP, ""):
            yield f"{name}: others are told to reach it at {engine.settings.host}"
        if engine.settings.port != ports["side"]:
            yield f"{name}: its side channel is at {engine.settings.port}, its port side is {ports['side']}"
        if engine.config.get("port") != ports["http"]:
            yield f"{name}: listens at {engine.config.get('port')}, its port http is {ports['http']}"
        if options["--service-discovery-port"] != [str(ports["http"])]:
            yield f"{name}: routers look for it at {options['--service-discovery-port']}"
        patterns = engine.settings.allow.split(",")
        for other in [e for e in found if e.workload.role == "prefill"]:
            address = f"{POD_IP}:{other.settings.port}"
            if engine.workload.role == "decode" and not any(fnmatchcase(address, p) for p in patterns):
                yield f"{name}: may not be sent to {address}"
    for role in ROLES:
        labels = dict(word.split("=") for word in options[f"--{role}-selector"])
        if [w.role for w in cluster.selected(labels)] != [role]:
            yield f"routers take {[w.name for w in cluster.selected(labels)]} for {role}"
    (router,) = [w for w in cluster.workloads if w.role == "router"]
    if options["--service-discovery-namespace"] != [router.namespace]:
        yield f"routers look in {options['--service-discovery-namespace']}"
    for flag, port in (("--port", "http"), ("--prometheus-port", "metrics")):
        if options[flag] != [str(router.ports[port])]:
            yield f"routers bind {options[flag]}, their port {port} is {router.ports[port]}"
    if {options[flag][0] for flag in ("--host", "--prometheus-host")} != {"0.0.0.0"}:
        yield "routers are reached from their own pod only"


def grace(cluster: Cluster) -> Iterator[str]:
    """Kubernetes waits longer than an engine needs for its requests, and the engine longer than prompts are kept."""
    for workload in cluster.workloads:
        hook = workload.container["lifecycle"]["preStop"]["exec"]["command"]
        if hook[:1] != ["sleep"] or float(hook[1]) < UNHEARD_S:
            yield f"{workload.name}: is sent requests when it is told to end: {hook}"
    for engine in engines(cluster):
        name, drain_s = engine.workload.name, float(engine.config.get("shutdown-timeout", 0))
        needed = float(engine.workload.container["lifecycle"]["preStop"]["exec"]["command"][1]) + drain_s + ENDING_S
        if (given := engine.workload.pod["terminationGracePeriodSeconds"]) < needed:
            yield f"{name}: is killed after {given} s and may need {needed:g} s"
        for what in ("hold_s", "lease_s"):
            kept_s = getattr(engine.settings, what)
            if engine.workload.role == "prefill" and kept_s > drain_s:
                yield f"{name}: ends after {drain_s:g} s, and promises prompts for {what} {kept_s:g}"


def probes(cluster: Cluster) -> Iterator[str]:
    """Startup, readiness and liveness ask three different things, and patience grows with what is at stake."""
    for workload in cluster.workloads:
        found = {kind: workload.container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        if not all(found.values()):
            yield f"{workload.name}: lacks a probe"
            continue
        alive = "/liveness" if workload.role == "router" else "/health"
        for kind, probe in found.items():
            if kind != "readiness" and probe.get("httpGet") != {"path": alive, "port": "http"}:
                yield f"{workload.name}: {kind} asks {probe}"
        ready = found["readiness"]
        if workload.role == "router":
            if ready.get("httpGet") != {"path": "/readiness", "port": "http"}:
                yield f"{workload.name}: readiness asks {ready}"
        else:
            words = " ".join(ready.get("exec", {}).get("command", []))
            for part in (f"http://localhost:{workload.ports['http']}/health", "pdkv health"):
                if part not in words or not words.startswith("sh -ec "):
                    yield f"{workload.name}: readiness doesn't ask {part}"
        patience = {kind: probe["periodSeconds"] * probe.get("failureThreshold", 3) for kind, probe in found.items()}
        if patience["startup"] < LOADING_S or patience["liveness"] < 3 * patience["readiness"]:
            yield f"{workload.name}: gives up too early: {patience}"


def preflight(cluster: Cluster) -> Iterator[str]:
    """An engine starts only where the doctor finds what its settings ask for, and as process 1."""
    for engine in engines(cluster):
        shell, flags, script, name = engine.workload.container.get("command", ["", "", "", ""])
        checked, _, served = script.partition("; ")
        if (shell, flags, name, served) != ("sh", "-ec", "vllm", SERVES) or not checked.startswith("pdkv doctor"):
            yield f"{engine.workload.name}: starts without a look at its machine"
        if engine.settings.require_rdma is not ("--require-rdma" in checked):
            yield f"{engine.workload.name}: looks for RDMA and doesn't need it, or the other way round"


def resources(cluster: Cluster) -> Iterator[str]:
    """A GPU for each worker, a NIC where RDMA is required; memory is guaranteed, and shared memory is part of it."""
    for workload in cluster.workloads:
        asked, limits = (workload.container["resources"][k] for k in ("requests", "limits"))
        if asked.get("memory") != limits.get("memory") or "cpu" not in asked:
            yield f"{workload.name}: memory isn't guaranteed, or no CPU is asked for"
    for engine in engines(cluster):
        limits = engine.workload.container["resources"]["limits"]
        if limits.get(GPU) != str(engine.config.get("tensor-parallel-size")):
            yield f"{engine.workload.name}: has {limits.get(GPU)} GPUs for {engine.config.get('tensor-parallel-size')}"
        if engine.settings.require_rdma is not any(NIC.match(name) for name in limits):
            yield f"{engine.workload.name}: has no NIC and needs one, or the other way round"
        shared = [v["emptyDir"] for v in engine.workload.pod["volumes"] if v.get("emptyDir", {}).get("medium")]
        if len(shared) != 1 or quantity(shared[0]["sizeLimit"]) > quantity(limits["memory"]) / 2:
            yield f"{engine.workload.name}: /dev/shm is the container's own, or may take the memory of the rest"


def images(cluster: Cluster) -> Iterator[str]:
    """Pinned: a vLLM that the connector is tested with, this pdkv, and the router that tests run."""
    for workload in cluster.workloads:
        tag = workload.container["image"].rpartition(":")[2]
        if workload.role == "router":
            if tag != f"v{version(ROUTER)}":
                yield f"{workload.name}: {tag} isn't the router that is tested, {version(ROUTER)}"
            continue
        engine, _, ours = tag.rpartition("-")
        if ours != __version__ or engine.rpartition(".")[0] not in SUPPORTED:
            yield f"{workload.name}: {tag} isn't one of vLLM's {SUPPORTED} and pdkv {__version__}"


ALL = (configs, pairs, addresses, grace, probes, preflight, resources, images)
