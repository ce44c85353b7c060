"""Builds the image and runs it, as docs/deploy.md says and as the manifests would: `make image-test`.

    python -m tests.deploy.image [--folder FOLDER] [--twice]

Guarantees: each thing that is looked at is said, with what was seen; what is wrong ends it with exit code 1, what this
machine lacks with 2; containers and networks are gone afterwards, images stay for the next time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdkv import __version__
from pdkv.rpc.health import state_of
from pdkv.rpc.security import PlainText
from tests.certificates import Authority
from tests.deploy.cluster import K8S, Cluster, Workload
from tests.deploy.engine import Engine, NotPossible, limits, needed
from tests.deploy.pages import run_by
from tests.deploy.settings import quantity

IMAGE = f"pdkv:{__version__}"
MOST_BYTES = 1_500_000_000
USER = "10001:10001"
MBIT = 200
LONG_TOKENS = 1000
"""Of an answer that has to last until its node is told to end, and no longer than the grace period: 10 s here."""
NETWORKS = ("pdkv-control", "pdkv-pages")
PODS = ("prefill-0", "decode-0", "router")
LOCK = """
import ctypes, mmap
memory = mmap.mmap(-1, 64 << 20)
start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
raise SystemExit(ctypes.CDLL(None).mlock(start, 64 << 20) != 0)
"""


def said(what: str, seen: object) -> None:
    print(f"ok: {what}: {seen}", flush=True)


def is_clean(engine: Engine) -> None:
    """hadolint has nothing to say."""
    linter = Path(sys.executable).with_name("hadolint")
    engine.run(str(linter), "deploy/docker/Dockerfile")
    said("hadolint", engine.run(str(linter), "--version").stdout.strip())


def does_what_the_page_says(engine: Engine) -> None:
    """Each block is run as it stands; the three containers serve a request, and end when they are told to."""
    engine.base()
    engine.remove(PODS, ["pdkv"])
    for block in run_by("make image-test"):
        began_s = time.monotonic()
        done = engine.run("bash", "-euo", "pipefail", "-c", block.text, timeout_s=3000)
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        said(f"docs/{block.page}: {block.text.split(maxsplit=2)[:2]}", f"{time.monotonic() - began_s:.0f} s, {last}")


def is_small_and_plain(engine: Engine) -> None:
    found = engine.inspect(IMAGE, "image")
    config = found["Config"]
    assert found["Size"] < MOST_BYTES, f"{found['Size']:,} B"
    assert config["User"] == USER, config["User"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert found["Healthcheck"]["Test"] == ["CMD", "pdkv", "health"], found["Healthcheck"]
    said("size", f"{found['Size']:,} B of {MOST_BYTES:,}")
    script = "find / -xdev -perm /6000 -type f 2>/dev/null; find /opt -user 10001"
    found = engine.run("docker", "run", "--rm", "--entrypoint", "sh", IMAGE, "-c", script, check=False).stdout
    assert found == "", found
    said("nothing changes the user, and nothing of ours is its user's to change", USER)


def is_the_same_again(engine: Engine) -> None:
    """From nothing, in the same way."""
    first = engine.inspect(IMAGE, "image")
    engine.docker("build", "--no-cache", "-f", "deploy/docker/Dockerfile", "-t", f"{IMAGE}-again", ".", timeout_s=3000)
    again = engine.inspect(f"{IMAGE}-again", "image")
    assert first["RootFS"] == again["RootFS"], (first["RootFS"], again["RootFS"])
    assert first["Config"] == again["Config"]
    # not the ids: buildah's history names intermediate images
    said("built twice", f"the same layers: {first['RootFS']['Layers']}")


# --- as the manifests would -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """One pod of each role of an overlay, on one network for calls and one for pages, both shaped."""

    engine: Engine
    cluster: Cluster
    folder: Path
    """Readable by the containers' user."""
    authority: Authority = field(default_factory=Authority)

    def __enter__(self) -> Fleet:
        self.engine.remove(PODS, NETWORKS)
        self.engine.docker("network", "create", NETWORKS[0])
        self.engine.docker("network", "create", "--disable-dns", NETWORKS[1])
        for workload in self.workloads:
            self.start(workload)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.remove(PODS, NETWORKS)

    @property
    def workloads(self) -> list[Workload]:
        return [self.cluster.workload(role) for role in ("prefill", "decode", "router")]

    def start(self, workload: Workload) -> None:
        """User, root, capabilities, memory, variables and files are those of the manifest."""
        name, pod, container = pod_of(workload), workload.pod["securityContext"], workload.container
        flags = ["--name", name, "--hostname", name, "--network-alias", f"{name}.{workload.name}"]
        flags += ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--security-opt", "no-new-privileges"]
        flags += ["--cap-drop", "ALL", "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:size=256m"]
        flags += ["--memory", str(int(quantity(container["resources"]["limits"]["memory"])))]
        flags += [f"--env={key}={value}" for key, value in workload.environment(name).items()]
        flags += [f"--volume={at}:{to}:ro" for at, to in self.files(workload)]
        # the engine's DNS has names, and no services
        flags += [
            "--env=PDKV_PREFILL_ADDRESSES=prefill-0.prefill:7000",
            "--env=PDKV_DECODE_ADDRESSES=decode-0.decode:7000",
        ]
        if workload.role != "router":
            flags.append("--env=PDKV_NET_DEVICES=eth1")
        self.engine.docker("create", *flags, "--network", NETWORKS[0], IMAGE, *container["args"])
        self.engine.docker("network", "connect", NETWORKS[1], name)
        self.engine.docker("start", name)
        self.shape(name)

    def files(self, workload: Workload) -> Iterator[tuple[Path, str]]:
        """Settings as the ConfigMap has them, and key files as cert-manager would make them."""
        settings = self.folder / f"{workload.name}.yaml"
        settings.write_text(workload.file_at("/etc/pdkv/config.yaml"), "utf-8")
        yield settings, "/etc/pdkv/config.yaml"
        if names := workload.dns_names(pod_of(workload)):
            made = self.authority.files(self.folder / workload.name, *names)
            for file, name in ((made.ca, "ca.crt"), (made.certificate, "tls.crt"), (made.key, "tls.key")):
                file.chmod(0o644)
                yield file, f"/etc/pdkv-tls/{name}"

    def shape(self, name: str) -> None:
        """What comes to the container, over either network, has this rate."""
        links = self.engine.run("ip", "-o", "link").stdout.splitlines()
        for device in ("eth0", "eth1"):
            number = self.engine.docker("exec", name, "cat", f"/sys/class/net/{device}/iflink")
            (veth,) = [line.split()[1].partition("@")[0] for line in links if line.startswith(f"{number}: ")]
            rate = ["rate", f"{MBIT}mbit", "burst", "128kb", "latency", "20ms"]
            self.engine.run("tc", "qdisc", "replace", "dev", veth, "root", "tbf", *rate)

    def answers(self, workload: Workload, kind: str) -> bool:
        """As the kubelet would ask: by itself from outside, or by a command inside."""
        name, probe = pod_of(workload), workload.container[f"{kind}Probe"]
        if "exec" in probe:
            return self.engine.run("docker", "exec", name, *probe["exec"]["command"], check=False).returncode == 0
        network = self.engine.inspect(name)["NetworkSettings"]["Networks"][NETWORKS[0]]
        address, service = f"{network['IPAddress']}:{probe['grpc']['port']}", probe["grpc"].get("service", "")
        return asyncio.run(state_of(address, PlainText(), service=service, within_s=10)) == "SERVING"

    def ask(self, prompt: str, tokens: int, *more: str) -> list[str]:
        """The command of a client, in the router's container."""
        ask = ["pdkv", "generate", prompt, "--router", "router:7000", "--max-tokens", str(tokens), "--wait", "240"]
        return ["docker", "exec", "router", *ask, *more]

    def arrived_bytes(self, name: str, device: str) -> int:
        return int(self.engine.docker("exec", name, "cat", f"/sys/class/net/{device}/statistics/rx_bytes"))


def pod_of(workload: Workload) -> str:
    return "router" if workload.role == "router" else workload.pod_names[0]


@contextmanager
def fleet(engine: Engine, overlay: str) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with Fleet(engine, Cluster.of(K8S / "overlays" / overlay), Path(folder)) as running:
            yield running


def serves_as_in_a_pod(engine: Engine) -> None:
    with fleet(engine, "cpu-demo") as pods:
        account = engine.run(*pods.ask("a page of many bytes " * 100, 4), timeout_s=300).stderr.splitlines()[-1]
        shipped = pods.arrived_bytes("decode-0", "eth1")
        assert "digests verified" in account, account
        assert shipped > 10_000_000, shipped
        said(f"a request over two networks of {MBIT} Mbit/s", f"{account}; {shipped:,} B came over the one for pages")
        is_well(pods)
        ends_after_its_requests(pods)


def serves_with_certificates(engine: Engine) -> None:
    """Those that components/mtls asks for: everybody who has to be let in is, and nobody else."""
    with fleet(engine, "mtls") as pods:
        account = engine.run(*pods.ask("a page of many bytes " * 10, 4), timeout_s=300).stderr.splitlines()[-1]
        said("a request under mutual TLS", account)
        is_well(pods)
        refused = engine.run("docker", "exec", "prefill-0", "pdkv", "status", "decode-0.decode:7000", check=False)
        assert "NotAuthorised" in refused.stderr, refused.stderr
        said("who isn't named is refused", refused.stderr)


def is_well(pods: Fleet) -> None:
    for workload in pods.workloads:
        name = pod_of(workload)
        asked = {kind: pods.answers(workload, kind) for kind in ("startup", "readiness", "liveness")}
        assert all(asked.values()), (name, asked)
        pods.engine.docker("healthcheck", "run", name)
        user = pods.engine.docker("exec", name, "id", "-u")
        written = pods.engine.run("docker", "exec", name, "touch", "/opt/pdkv/x", check=False).stderr
        assert (user, "Read-only" in written) == ("10001", True), (user, written)
    said("each answers its probes, runs as its user and can't write to its root", PODS)


def ends_after_its_requests(pods: Fleet) -> None:
    """SIGTERM while a request runs: it gets all of its tokens, then the process ends with 0."""
    engine = pods.engine
    with asked(pods, LONG_TOKENS) as request:
        began_s = time.monotonic()
        engine.docker("stop", "--time", "140", "decode-0", timeout_s=200)
        took_s = time.monotonic() - began_s
        _, account = request.communicate(timeout=60)
    assert request.returncode == 0, account
    assert f"{LONG_TOKENS} tokens (length)" in account, account
    log = engine.run("docker", "logs", "decode-0").stderr
    assert -1 < log.rfind("told to end") < log.rfind("request ended"), "it wasn't told to end while the request ran"
    code = engine.inspect("decode-0")["State"]["ExitCode"]
    assert code == 0, code
    said(
        "told to end under a request", f"it got its {LONG_TOKENS} tokens, the process ended with 0 after {took_s:.1f} s"
    )


@contextmanager
def asked(pods: Fleet, tokens: int) -> Iterator[subprocess.Popen[str]]:
    """A client that has had its first token."""
    command, pipe = pods.ask("once upon a page", tokens), subprocess.PIPE
    with subprocess.Popen(command, env=pods.engine.environment, stdout=pipe, stderr=pipe, text=True) as request:
        assert request.stdout is not None
        assert request.stdout.read(1), request.communicate()
        yield request


def ends_before_it_serves(engine: Engine) -> None:
    """Process 1 has no default for SIGTERM; ours has, from its first lines on."""
    engine.remove(["early"])
    try:
        engine.docker("run", "-d", "--name", "early", "--network", "none", IMAGE, "prefill", "--insecure")
        pid = engine.inspect("early")["State"]["Pid"]
        until(lambda: handles(pid, 15), "a process that handles SIGTERM")
        engine.docker("kill", "--signal", "TERM", "early")
        code = engine.docker("wait", "early", timeout_s=60)
        assert code == "143", code
        said("told to end while it still loads", f"exit code {code}")
    finally:
        engine.remove(["early"])


def handles(pid: int, number: int) -> bool:
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def locks_memory(engine: Engine) -> None:
    """What components/rdma/locked-memory.yaml says of the capability: it works for root only."""
    ulimits = [f"--ulimit={limit}" for limit in limits(memlock=8 << 20)]
    run = ["docker", "run", "--rm", "--network", "none", "--cap-drop", "ALL", *ulimits]
    python = ["-c", LOCK]

    def locked(*flags: str, entry: tuple[str, ...] = ()) -> bool:
        command = [*entry, "/opt/pdkv/bin/python", *python]
        done = engine.run(*run, *flags, "--entrypoint", command[0], IMAGE, *command[1:], check=False)
        assert not done.stderr, done.stderr
        return done.returncode == 0

    seen = {
        "user 10001": locked(),
        # podman makes it an ambient one, which Kubernetes doesn't
        "user 10001 with IPC_LOCK, as Kubernetes adds it": locked(
            "--cap-add", "IPC_LOCK", entry=("setpriv", "--ambient-caps", "-all")
        ),
        "root without capabilities": locked("--user", "0:0"),
        "root with IPC_LOCK": locked("--user", "0:0", "--cap-add", "IPC_LOCK"),
    }
    assert list(seen.values()) == [False, False, False, True], seen
    said("64 MiB locked where the limit is 8 MiB", seen)


def until(holds: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
        os.sched_yield()


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the image and runs it.")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/pdkv-image"), help="keeps images and layers")
    parser.add_argument("--twice", action="store_true", help="build it twice and compare")
    options = parser.parse_args()
    try:
        needed()
    except NotPossible as error:
        print(f"image-test can't run here: {error}", file=sys.stderr)
        return 2
    engine = Engine(options.folder)
    checks = [is_clean, does_what_the_page_says, is_small_and_plain, locks_memory, ends_before_it_serves]
    checks += [serves_as_in_a_pod, serves_with_certificates] + ([is_the_same_again] if options.twice else [])
    check = is_clean
    try:
        for check in checks:
            check(engine)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"WRONG: {check.__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        engine.remove((*PODS, "early"), (*NETWORKS, "pdkv"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
