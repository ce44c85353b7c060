"""Checks of what will carry the pages: RDMA devices, UCX, its settings.

Guarantees: where RDMA is required and can't be used, that is a failure with its reason, the same one that a node
refuses to start with (`require_rdma`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pdkv.cli.doctor.finding import Finding, fail, ok, warn
from pdkv.cli.doctor.needs import Needs
from pdkv.cli.doctor.system import socket_buffers
from pdkv.errors import LaneRefused
from pdkv.fields import parse_bytes
from pdkv.machine.devices import Devices, RdmaDevice, RdmaPort, lets_use
from pdkv.machine.resources import Process
from pdkv.transfer.backends.ucx_probe import UcxFacts
from pdkv.transfer.backends.ucx_settings import Setting


@dataclass(frozen=True, slots=True)
class _Kind:
    """Transports of one kind, as UCX_TLS names them."""

    names: re.Pattern[str]
    """Each of these lets the kind in."""
    bars: frozenset[str]
    """Each of these behind a "^" leaves it out."""


_RDMA = _Kind(re.compile(r"all|ib|rc|rc_\w+|dc|dc_\w+|srd|gga\w*"), frozenset({"all", "ib"}))
_CUDA = _Kind(re.compile(r"all|cuda|cuda_copy|cuda_cpy"), frozenset({"all", "cuda", "cuda_copy", "cuda_cpy"}))
_EXPOSE = "give the container /dev/infiniband (an RDMA device plugin's resource, or the device), with rights to open it"
_ETHERNET = "Ethernet"


def rdma(needs: Needs, found: Devices) -> Finding:
    """Whether reads can go over RDMA, and whether they have to."""
    check, usable = "rdma", found.usable_rdma
    worse = fail if needs.require_rdma else warn
    must = "RDMA is required, but " if needs.require_rdma else ""
    if not found.rdma:
        words = "there is no RDMA device (/sys/class/infiniband)"
        if needs.require_rdma:
            return fail(check, f"{must}{words}", "a machine with one, or without require_rdma")
        return ok(check, f"{words}: between hosts reads go over TCP")
    if not usable:
        todo = _EXPOSE if any(p.active for d in found.rdma for p in d.ports) else "bring a port up (ibstat, ip link)"
        return worse(check, f"{must}no device can be used: {'; '.join(map(_unusable, found.rdma))}", todo)
    if not _lets_in(needs.ucx_tls, _RDMA):
        return worse(check, f"{must}UCX_TLS={needs.ucx_tls} leaves it out", "add rc to ucx_tls, or leave it empty")
    named = _named(needs.net_devices, usable)
    if not named:
        names = ", ".join(f"{d.name}:{p.number}" for d in usable for p in d.ports if p.active)
        return worse(check, f"{must}UCX_NET_DEVICES={needs.net_devices} leaves it out", f"net_devices with {names}")
    unroutable = [device.name for device in named if any(map(_unroutable, device.ports))]
    words = "; ".join(map(_ports, named))
    if unroutable:
        lacking = f"{words}; no RoCE v2 GID of an address on {', '.join(unroutable)}"
        return warn(check, lacking, "give its network interface an IP address: only such a GID is routed between hosts")
    return ok(check, words)


def require_rdma(needs: Needs, found: Devices) -> None:
    """Raises `LaneRefused` if RDMA is required and this machine can't have it, whoever the peer is."""
    finding = rdma(needs, found)
    if needs.require_rdma and finding.level == "fail":
        raise LaneRefused(f"{finding.found}: {finding.todo}", lane="none", todo=finding.todo)


def ucx(facts: UcxFacts | str, needs: Needs, found: Devices) -> Finding:
    """What UCX says of itself, or why it said nothing."""
    check = "ucx"
    if isinstance(facts, str):
        todo = "see what it says with UCX_LOG_LEVEL=info; keep Debian's libibverbs1 and ibverbs-providers out"
        return fail(check, facts, todo)
    listed = ", ".join(f"{transport}/{device}" for transport, device in facts.resources)
    words = f"{facts.version}: {listed}"
    unseen = [d.name for d in _named(needs.net_devices, found.usable_rdma) if d.name not in facts.devices]
    if unseen and _lets_in(needs.ucx_tls, _RDMA):
        todo = "see UCX_LOG_LEVEL=info for why: rights on /dev/infiniband, memlock, or the driver's library"
        return (fail if needs.require_rdma else warn)(check, f"{words}; it doesn't use {', '.join(unseen)}", todo)
    return ok(check, words)


def settings(chosen: tuple[Setting, ...], process: Process) -> Iterator[Finding]:
    """A row a setting with its reason, and what the kernel makes of the socket buffer."""
    for setting in chosen:
        check = setting.name
        if setting.source == "operator" and setting.choice and setting.value != setting.choice:
            both = "; both ends must be equal" if "SEG_SIZE" in check else ""
            words = f"{setting.value}, yours; ours would be {setting.choice}: {setting.reason}"
            yield warn(check, words, f"unset it, unless you measured it{both}")
        else:
            reason = setting.reason or "set by you"
            yield ok(check, f"{setting.value}: {reason}")
    buffer = next((s.value for s in chosen if s.name == "UCX_TCP_SNDBUF"), "")
    if re.fullmatch(r"\d+[kKmM]?", buffer):
        yield socket_buffers(process, parse_bytes(f"{buffer}iB" if buffer[-1].isalpha() else buffer))


def gpu_transports(needs: Needs) -> Finding:
    """UCX takes a GPU's memory for the host's unless it may use a CUDA transport."""
    check = "gpu memory"
    if _lets_in(needs.ucx_tls, _CUDA):
        return ok(check, "UCX may use its CUDA transports")
    words = (
        f"UCX_TLS={needs.ucx_tls} leaves cuda_copy out: UCX takes GPU memory for the host's, and it can't be registered"
    )
    return fail(check, words, "add cuda_copy,cuda_ipc to ucx_tls, or leave it empty")


def _lets_in(ucx_tls: str, kind: _Kind) -> bool:
    names = [name.strip() for name in ucx_tls.removeprefix("^").split(",")]
    if ucx_tls.startswith("^"):
        return not kind.bars.intersection(names)
    return not ucx_tls or any(map(kind.names.fullmatch, names))


def _named(net_devices: str, usable: tuple[RdmaDevice, ...]) -> tuple[RdmaDevice, ...]:
    return tuple(device for device in usable if lets_use(net_devices, device.name))


def _unroutable(port: RdmaPort) -> bool:
    return port.active and port.link_layer == _ETHERNET and not port.roce_gids


def _unusable(device: RdmaDevice) -> str:
    states = ", ".join(f"port {port.number} is {port.state}" for port in device.ports) or "it has no port"
    return f"{device.name}: {states if device.openable else '/dev/infiniband/uverbs of it can not be opened here'}"


def _ports(device: RdmaDevice) -> str:
    ports = [p for p in device.ports if p.active]
    rates = ", ".join(f"port {p.number} {p.link_layer or 'up'} at {p.gbit_per_s or 0:g} Gbit/s" for p in ports)
    return f"{device.name}: {rates}"
