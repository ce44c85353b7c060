"""Two nodes on one machine: two network namespaces, joined by shaped links.

    python benchmarks/netns.py [--links 2] [--mbit 1000]                     measure the links with iperf3
    python benchmarks/netns.py [--far 'COMMAND …'] -- COMMAND …              run COMMAND at the near end

    with TwoSpaces(links=2, mbit=1000) as spaces:
        subprocess.run([*spaces.near.prefix, "pdkv", …])

Guarantees: each link is a veth pair with `tc tbf` on either end, so that a direction carries its rate and no more; when
the `with` is left, by an exception, Ctrl-C or SIGTERM too, what runs in the namespaces is killed and namespaces and
links are gone; what a killed run has left is removed by the next one. Needs Linux, root, `ip` and `tc` (iproute2), and
iperf3 for rates.

Two namespaces, not one beside the machine's own: bytes can't take a way round the links then, and no other device is
there for UCX to choose. `near_here` keeps the near end in this process's namespace, for what has to be called from it.
Either way UCX knows that it is one host: `UCX_TLS=tcp`, or pages don't travel over the links at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

MTU = 9000
BURST_S = 0.001
"""Of the rate: a token bucket that holds less than a timer's tick is slower than its rate."""
LEAST_BURST = 128 * 1024
"""Bytes: two of the largest packets that the kernel hands to a veth; smaller buckets cut them up."""
QUEUE_S = 0.02
"""Of the rate: what waits for the link before packets are lost."""
RAW_RATE_S = 2.0
WAIT_S = 10.0
START_S = 60.0
IPERF3_PORT = 5201
TCP_LISTEN = "0A"
"""In /proc/net/tcp."""
SPACE = re.compile(r"pdkv-(\d+)-(near|far)")
DEVICE = re.compile(r"pk(\d+)n\d+")
"""A near end in this process's namespace."""


class NotPossible(Exception):
    """What this machine lacks for namespaces or for iperf3, and the way out; or what a tool said."""


@dataclass(frozen=True, slots=True)
class Space:
    """A network namespace; its name is empty if it is this process's own."""

    name: str

    @property
    def prefix(self) -> list[str]:
        """In front of a command that is to run inside."""
        return ["ip", "netns", "exec", self.name] if self.name else []

    def tool(self, line: str) -> None:
        """`ip` or `tc`, inside. Raises `NotPossible` with what it said."""
        tool, *words = line.split()
        done = subprocess.run([tool, *(["-n", self.name] if self.name else []), *words], capture_output=True, text=True)
        if done.returncode:
            raise NotPossible(f"{line}: {(done.stderr or done.stdout).strip()}")


@dataclass(frozen=True, slots=True)
class Link:
    """Devices and addresses of its ends."""

    near_device: str
    far_device: str
    near_address: str
    far_address: str


class TwoSpaces:
    """A context. Raises `NotPossible` when it is entered where it can't be."""

    def __init__(self, *, links: int = 1, mbit: int = 1000, near_here: bool = False) -> None:
        """`mbit`: 10^6 bit/s of each link, in either direction."""
        if links < 1 or mbit < 1:
            raise NotPossible(f"{links} links of {mbit} Mbit/s; at least 1 of each")
        self.mbit = mbit
        self.near = Space("" if near_here else f"pdkv-{os.getpid()}-near")
        self.far = Space(f"pdkv-{os.getpid()}-far")
        near = f"pk{os.getpid()}n" if near_here else "link"
        self.links = [Link(f"{near}{i}", f"link{i}", f"10.98.{i + 7}.1", f"10.98.{i + 7}.2") for i in range(links)]
        self._held = ExitStack()

    def __enter__(self) -> Self:
        missing = missing_tools("ip", "tc")
        if missing:
            raise NotPossible(f"network namespaces need {' and '.join(missing)}")
        with ExitStack() as making:
            making.enter_context(terminable())
            remove_leftovers()
            making.callback(self._remove)
            for space in {self.near, self.far} - {Space("")}:
                Space("").tool(f"ip netns add {space.name}")
                space.tool("ip link set lo up")
            for link in self.links:
                self._join(link)
            self._held = making.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def set(self, state: str, link: int = 0) -> None:
        """A link "up" or "down", at the far end."""
        self.far.tool(f"ip link set {self.links[link].far_device} {state}")

    def iperf3(self, *, link: int = 0, seconds: float = RAW_RATE_S) -> float:
        """Gbit/s of payload in one TCP stream from far to near, asked for by near: the shape of a READ.

        Raises `NotPossible` without iperf3, or with what it said.
        """
        if missing := missing_tools("iperf3"):
            raise NotPossible(f"the rate of a link needs {missing[0]}")
        address = self.links[link].far_address
        serve = [*self.far.prefix, "iperf3", "-s", "-1", "-B", address, "-p", str(IPERF3_PORT)]
        with running(serve, subprocess.DEVNULL) as server:
            until_listening(server, IPERF3_PORT)
            ask = [*self.near.prefix, "iperf3", "-c", address, "-p", str(IPERF3_PORT), "-R", "-J", "-t", f"{seconds:g}"]
            done = subprocess.run(ask, capture_output=True, text=True, timeout=seconds + WAIT_S)
        said: dict[str, Any] = json.loads(done.stdout or "{}")
        if "error" in said or done.returncode:
            raise NotPossible(f"iperf3: {said.get('error', done.stderr)}")
        return float(said["end"]["sum_received"]["bits_per_second"]) / 1e9

    def _join(self, link: Link) -> None:
        into = f"netns {self.near.name}" if self.near.name else ""
        pair = f"type veth peer name {link.far_device} netns {self.far.name}"
        Space("").tool(f"ip link add {link.near_device} {into} {pair}")
        burst = max(LEAST_BURST, int(self.mbit * 1e6 / 8 * BURST_S))
        for space, device, address in (
            (self.near, link.near_device, link.near_address),
            (self.far, link.far_device, link.far_address),
        ):
            space.tool(f"ip addr add {address}/24 dev {device}")
            space.tool(f"ip link set {device} mtu {MTU} up")
            shape = f"rate {self.mbit}mbit burst {burst} latency {QUEUE_S * 1000:g}ms"
            space.tool(f"tc qdisc add dev {device} root tbf {shape}")

    def _remove(self) -> None:
        for space in {self.near, self.far} - {Space("")}:
            remove_space(space.name)
        for link in self.links:
            if not self.near.name:
                _quietly("ip", "link", "del", link.near_device)


def missing_tools(*tools: str) -> list[str]:
    """Of these, and root's rights where namespaces are to be made; each with the way out."""
    packages = {"ip": "iproute2", "tc": "iproute2", "iperf3": "iperf3"}
    found = [f"{tool} (apt-get install {packages[tool]})" for tool in tools if shutil.which(tool) is None]
    return [*(["root"] if "ip" in tools and os.geteuid() else []), *found]


def remove_space(name: str) -> None:
    """Kill what runs in it, and remove it with its ends of links, which takes the other ends along."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in map(int, listed.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    # a namespace outlives its name while a process in it dies: its links must not
    for device in devices(name):
        _quietly("ip", "-n", name, "link", "del", device)
    _quietly("ip", "netns", "del", name)


def remove_leftovers() -> list[str]:
    """Of runs of this script that were killed; says what they were."""
    names = _of_the_dead(SPACE, spaces())
    for name in names:
        remove_space(name)
    ends = _of_the_dead(DEVICE, devices())
    for device in ends:
        _quietly("ip", "link", "del", device)
    return names + ends


def _of_the_dead(named: re.Pattern[str], names: Iterable[str]) -> list[str]:
    """Which of these say that a process made them that is no more."""
    return [m[0] for m in map(named.fullmatch, names) if m and not Path(f"/proc/{m[1]}").exists()]


def spaces() -> list[str]:
    """Names of all network namespaces."""
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in said.splitlines() if line.strip()]


def devices(space: str = "") -> list[str]:
    """Of veth pairs, in a namespace."""
    line = ["ip", *(["-n", space] if space else []), "-json", "link", "show", "type", "veth"]
    said = subprocess.run(line, capture_output=True, text=True).stdout
    return [device["ifname"] for device in json.loads(said or "[]") if device]


@contextmanager
def running(line: Sequence[str], stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command's process, killed at the end."""
    with subprocess.Popen(line, stdout=stdout) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends this process as an exception does."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def until_listening(process: subprocess.Popen[bytes], port: int = 0) -> None:
    """Until a process in the namespace of this one's command listens on a TCP port: that one, or any.

    Raises `NotPossible` if it ends instead, or nobody listens in good time.
    """
    ours, until = os.stat("/proc/self/ns/net").st_ino, time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            # `ip` becomes the command when it is inside
            inside = os.stat(f"/proc/{process.pid}/ns/net").st_ino != ours
            tables = [Path(f"/proc/{process.pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        except OSError:
            continue
        rows = [line.split() for table in tables for line in table.splitlines()]
        ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == TCP_LISTEN}
        if inside and (port in ports if port else ports):
            return
        time.sleep(0.01)
    raise NotPossible(f"{process.args}: does not listen")


def _quietly(*line: str) -> None:
    """For what may be gone already."""
    subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: COMMAND's, or 2 where it isn't possible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=1)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each link, 10^6 bit/s (default 1000)")
    parser.add_argument(
        "--far",
        default="",
        help="a command that runs at the far end meanwhile; COMMAND begins when something listens there",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="default: iperf3 over each link, as a READ")
    options = parser.parse_args(arguments)
    try:
        with TwoSpaces(links=options.links, mbit=options.mbit) as spaces, ExitStack() as held:
            for i, link in enumerate(spaces.links):
                ends = f"{link.near_device} {link.near_address} to {link.far_device} {link.far_address}"
                rate = "" if options.command else f", iperf3 {spaces.iperf3(link=i):.3f} Gbit/s"
                print(f"near {ends} far, {options.mbit} Mbit/s{rate}", file=sys.stderr, flush=True)
            if options.far:
                far = held.enter_context(running([*spaces.far.prefix, *shlex.split(options.far)]))
                until_listening(far)
            return subprocess.run([*spaces.near.prefix, *options.command]).returncode if options.command else 0
    except NotPossible as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
