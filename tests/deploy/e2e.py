"""The overlays against a real API server, and cpu-demo on a real cluster: `make deploy-test`.

    KUBECONFIG=… python -m tests.deploy.e2e [--overlay FOLDER] [--keep]

Guarantees: what could not run says SKIP and why, on a line of its own; what is wrong ends it with exit code 1; a
namespace that was there before is left alone, its own is gone afterwards unless it is to be kept. An `--overlay` of
yours on top of cpu-demo may name another image.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.cluster import K8S, ROOT
from tests.deploy.pages import run_by

NAMESPACE = "pdkv"
DEMO = K8S / "overlays" / "cpu-demo"
NEEDS = {"cpu-demo": "", "rdma": "", "mtls": "certificates.cert-manager.io", "vllm": ""}
"""Overlays, and the kind that somebody must have defined."""
CLIENTS = 4
USED_WITHIN_S = 5.0
"""From Ready to up in the routers' eyes."""
PROMPT = "the same prompt, again and again " * 20


def kubectl(*args: str, timeout_s: float = 900) -> str:
    """What it says. Raises `AssertionError` with that, if it isn't 0."""
    done = subprocess.run(["kubectl", *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"kubectl {shlex.join(args)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def said(what: str, seen: object) -> None:
    print(f"ok: {what}: {seen}", flush=True)


def skipped(what: str, why: str) -> None:
    print(f"SKIP {what}: {why}", flush=True)


def is_taken_by_the_server() -> None:
    """As far as an API server looks, and whatever admits pods there."""
    kubectl("apply", "-f", str(DEMO / "namespace.yaml"))
    for overlay, kind in NEEDS.items():
        if kind and kind not in kubectl("get", "crd", "-o", "name"):
            skipped(f"{overlay} --dry-run=server", f"the cluster has no {kind}")
            continue
        objects = kubectl("apply", "--dry-run=server", "-k", str(K8S / "overlays" / overlay)).splitlines()
        said(f"{overlay} --dry-run=server", f"{len(objects)} objects")


def does_what_the_pages_say(overlay: Path) -> None:
    for block in run_by("make deploy-test"):
        text = block.text.replace("deploy/k8s/overlays/cpu-demo", str(overlay))
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        said(f"docs/{block.page}", text.splitlines()[0])


@dataclass
class Load:
    """Clients that ask for the same thing without end."""

    answers: list[tuple[int, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        ask = ["pdkv", "generate", PROMPT, "--router", "router:8000", "--max-tokens", "32", "--json"]
        while not self.done.is_set():
            command = ["kubectl", "-n", NAMESPACE, "exec", "deployment/router", "--", *ask]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                self.failures.append(done.stderr.strip())
            else:
                self.answers.append(tuple(json.loads(done.stdout)["tokens"]))


@contextmanager
def under_load(what: str) -> Iterator[Load]:
    """Nothing may fail in it, and every answer has to be the same one."""
    load = Load()
    clients = [threading.Thread(target=load.ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield load
    finally:
        load.done.set()
        for client in clients:
            client.join()
    assert not load.failures, f"{what}: {len(load.failures)} of {len(load.answers)} failed: {load.failures[0]}"
    assert len(set(load.answers)) == 1, f"{what}: {len(set(load.answers))} different answers"
    said(what, f"{len(load.answers)} requests, none lost, one answer")


def survives_the_loss_of_a_prefill_pod() -> None:
    with under_load("a prefill pod deleted under load"):
        before = pod("prefill-0")["metadata"]["uid"]
        kubectl("-n", NAMESPACE, "delete", "pod", "prefill-0", "--grace-period=0", "--force")
        until(lambda: is_ready("prefill-0", unlike=before), "a new prefill-0 that is Ready", 600)
        ready_s = time.monotonic()
        until(lambda: "prefill-0.prefill:7000" in up_nodes(), "prefill-0 up in the router's eyes", USED_WITHIN_S)
        said("the new pod is used", f"{time.monotonic() - ready_s:.1f} s after it was Ready")


def survives_rolling_updates() -> None:
    for role in ("prefill", "decode"):
        with under_load(f"statefulset/{role} rolled under load"):
            kubectl("-n", NAMESPACE, "rollout", "restart", f"statefulset/{role}")
            kubectl("-n", NAMESPACE, "rollout", "status", "--timeout=20m", f"statefulset/{role}", timeout_s=1300)


def survives_scaling() -> None:
    """Up and down again, with nothing else changed: a new node is used soon, and nobody loses a request."""
    for role in ("prefill", "decode"):
        with under_load(f"statefulset/{role} scaled to 3 and back under load"):
            kubectl("-n", NAMESPACE, "scale", f"statefulset/{role}", "--replicas=3")
            until(lambda role=role: is_ready(f"{role}-2", unlike=""), f"{role}-2 Ready", 600)
            ready_s = time.monotonic()
            new = f"{role}-2.{role}:7000"
            until(lambda role=role, new=new: new in up_nodes(role), f"{new} up in the router's eyes", USED_WITHIN_S)
            said("the new pod is used", f"{time.monotonic() - ready_s:.1f} s after it was Ready")
            kubectl("-n", NAMESPACE, "scale", f"statefulset/{role}", "--replicas=2")
            until(lambda role=role: not pod(f"{role}-2"), f"{role}-2 gone", 300)


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        kubectl("-n", NAMESPACE, "get", "pod", name, "--ignore-not-found", "-o", "json") or "{}"
    )
    return found


def is_ready(name: str, *, unlike: str) -> bool:
    found = pod(name)
    conditions = {c["type"]: c["status"] for c in found.get("status", {}).get("conditions", [])}
    return bool(found) and found["metadata"]["uid"] != unlike and conditions.get("Ready") == "True"


def up_nodes(role: str = "prefill") -> set[str]:
    """Addresses of nodes that the router uses."""
    ask = ["exec", "deployment/router", "--", "pdkv", "status", "router:8000", "--json"]
    nodes: dict[str, str] = json.loads(kubectl("-n", NAMESPACE, *ask))[role]
    return {address for address, state in nodes.items() if state == "up"}


def until(holds: Any, what: str, deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Deploys cpu-demo and does to it what operators and accidents do.")
    parser.add_argument("--overlay", type=Path, default=DEMO, help="a kustomization of cpu-demo with another image")
    parser.add_argument("--keep", action="store_true", help="leave the namespace there")
    options = parser.parse_args()
    if not os.environ.get("KUBECONFIG"):
        skipped("deploy-test", "KUBECONFIG isn't set: there is no API server to apply to; nothing was deployed")
        return 0
    said("server", kubectl("version").splitlines()[-1])
    if kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "-o", "name"):
        print(
            f"deploy-test can't run here: there is a namespace {NAMESPACE} already, and it would be deleted",
            file=sys.stderr,
        )
        return 2
    try:
        is_taken_by_the_server()
        does_what_the_pages_say(options.overlay.resolve())
        survives_the_loss_of_a_prefill_pod()
        survives_rolling_updates()
        survives_scaling()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    finally:
        if not options.keep:
            kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=10m")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
