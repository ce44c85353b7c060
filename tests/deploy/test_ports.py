"""Where a node's process really listens: network policies let nothing else through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.deploy.cluster import K8S, Cluster
from tests.deploy.isolation import UCX, UCX_LAST

LISTENS = "0A"
NODE = "prefill --model tiny --engine synthetic --pool-bytes 16MiB --bind 127.0.0.1:0 --ucx-tls tcp --insecure --json"
SPAN = "UCX_TCP_PORT_RANGE"


def listening(pid: int) -> set[int]:
    """TCP ports, of all addresses."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in sockets:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def ports_of_ucx(environment: Mapping[str, str]) -> set[int]:
    """Of a node that serves: all but the one that it says itself."""
    command = [sys.executable, "-m", "pdkv.cli", *NODE.split()]
    inherited = {name: value for name, value in os.environ.items() if name != SPAN}
    with subprocess.Popen(command, env=inherited | environment, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            said = json.loads(node.stdout.readline())
            return listening(node.pid) - {int(said["address"].rpartition(":")[2])}
        finally:
            node.terminate()


@pytest.mark.parametrize("told", [True, False])
def test_ucx_listens_where_policies_let_it_and_elsewhere_if_not_told(*, told: bool) -> None:
    workload = Cluster.of(K8S / "overlays" / "cpu-demo").workload("prefill")
    ports = ports_of_ucx({SPAN: workload.environment("prefill-0")[SPAN]} if told else {})
    assert ports
    assert all(UCX <= port <= UCX_LAST for port in ports) is told
