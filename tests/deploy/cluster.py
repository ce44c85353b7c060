"""What an overlay makes: objects, and of each pod the settings that its process would start with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdkv.config import DecodeConfig, PrefillConfig, RouterConfig, ServiceConfig
from pdkv.errors import ConfigError
from pdkv.resolve import resolve

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
ROLES: dict[str, type[ServiceConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}
CSI_FILES = ("tls.crt", "tls.key", "ca.crt")
"""What cert-manager's csi-driver puts into a volume."""
POD_IP = "10.0.0.7"
"""Of any pod."""


def kustomize(folder: Path) -> str:
    """The YAML that `kubectl apply -k` would send, by the pinned kubectl of this environment."""
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"{folder}: {done.stderr}"
    return done.stdout


def with_component(overlay: str, component: str, folder: Path) -> Cluster:
    """By a kustomization in `folder`, as docs/deploy.md writes it."""
    to = {name: os.path.relpath(K8S / name, folder.resolve()) for name in ("overlays", "components")}
    kustomization = {
        "namespace": "pdkv",
        "resources": [f"{to['overlays']}/{overlay}"],
        "components": [f"{to['components']}/{component}"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), "utf-8")
    return Cluster.of(folder)


@dataclass(frozen=True)
class Workload:
    """A StatefulSet or Deployment with one container."""

    object: Object
    cluster: Cluster

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.object["spec"]["template"]["metadata"]["labels"]
        return found

    @property
    def pod(self) -> Object:
        found: Object = self.object["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> Object:
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def role(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def namespace(self) -> str:
        return str(self.object["metadata"].get("namespace", "default"))

    @property
    def replicas(self) -> int:
        return int(self.object["spec"]["replicas"])

    @property
    def pod_names(self) -> list[str]:
        if self.object["kind"] == "StatefulSet":
            return [f"{self.name}-{i}" for i in range(self.replicas)]
        return [f"{self.name}-5c9f8d7b64-{i:05x}" for i in range(self.replicas)]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def volume_at(self, path: str) -> tuple[Object, str]:
        """The volume that is mounted over `path`, and the rest of the path. Raises `KeyError`."""
        for mount in self.container["volumeMounts"]:
            if path.startswith(mount["mountPath"].rstrip("/") + "/"):
                (volume,) = [v for v in self.pod["volumes"] if v["name"] == mount["name"]]
                return volume, path.removeprefix(mount["mountPath"].rstrip("/") + "/")
        raise KeyError(path)

    def file_at(self, path: str) -> str:
        """Of a ConfigMap. Raises `KeyError`."""
        volume, key = self.volume_at(path)
        return str(self.cluster.get("ConfigMap", volume["configMap"]["name"])["data"][key])

    def environment(self, pod_name: str) -> dict[str, str]:
        """As the kubelet sets it: a reference to a variable that isn't there before stays as it is written."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            found |= self.cluster.get("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in self.container.get("env", []):
            if "valueFrom" in entry:
                told = {"metadata.name": pod_name, "metadata.namespace": self.namespace, "status.podIP": POD_IP}
                found[entry["name"]] = told[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                known = dict(found)
                found[entry["name"]] = re.sub(
                    r"\$\((\w+)\)", lambda m, known=known: known.get(m[1], m[0]), entry["value"]
                )
        return found

    def config(self, pod_name: str) -> ServiceConfig:
        """What the process in that pod would come to. Raises `ConfigError`, `KeyError`."""
        role, flag, path = self.container["args"]
        assert flag == "--config"
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(self.file_at(path))
            file.flush()
            return resolve(ROLES[role], {}, file.name, self.environment(pod_name))

    def dns_names(self, pod_name: str) -> tuple[str, ...]:
        """In the certificate of its pod; none without one."""
        for volume in self.pod["volumes"]:
            if (csi := volume.get("csi", {})).get("driver") == "csi.cert-manager.io":
                words = csi["volumeAttributes"]["csi.cert-manager.io/dns-names"]
                words = words.replace("${POD_NAME}", pod_name).replace("${POD_NAMESPACE}", self.namespace)
                return tuple(words.split(","))
        return ()


class Cluster:
    """All objects of one build."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    @classmethod
    def of(cls, folder: Path) -> Cluster:
        return cls(list(yaml.safe_load_all(kustomize(folder))))

    def all(self, *kinds: str) -> Iterator[Object]:
        return (o for o in self.objects if o["kind"] in kinds)

    def get(self, kind: str, name: str) -> Object:
        """Raises `KeyError`."""
        for found in self.all(kind):
            if found["metadata"]["name"] == name:
                return found
        raise KeyError(f"{kind} {name}")

    def has(self, kind: str, name: str) -> bool:
        return any(o["metadata"]["name"] == name for o in self.all(kind))

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(o, self) for o in self.all("StatefulSet", "Deployment")]

    def workload(self, name: str) -> Workload:
        (found,) = [w for w in self.workloads if w.name == name]
        return found

    def selected(self, selector: Mapping[str, Any]) -> list[Workload]:
        """By the selector of a Service, or the matchLabels of another object."""
        assert set(selector) != {"matchExpressions"}, selector
        labels = selector.get("matchLabels", selector)
        return [w for w in self.workloads if labels.items() <= w.labels.items()]

    def configs(self) -> Iterator[tuple[Workload, str, ServiceConfig]]:
        """Of all pods of pdkv's own nodes whose settings are good."""
        for workload in self.workloads:
            if "command" in workload.container:
                continue  # not the image's own command
            for pod_name in workload.pod_names:
                with suppress(ConfigError, KeyError):
                    yield workload, pod_name, workload.config(pod_name)
