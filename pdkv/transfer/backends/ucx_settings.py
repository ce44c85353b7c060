"""What UCX is set to before an agent is made, from what this machine has, and why.

Guarantees: what the operator has set stays, and is told as such; each choice comes with its reason; what both ends of
a connection must agree on is chosen alike on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from pdkv.machine.devices import Devices

PREFIX = "UCX_"
NET_DEVICES = "UCX_NET_DEVICES"
Source = Literal["chosen", "operator"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable of UCX."""

    name: str
    value: str
    """In force: the operator's, if there is one."""
    reason: str
    """Of our choice, also where the operator chose otherwise; empty for a variable that we never set."""
    source: Source
    choice: str = ""
    """What we would set."""


_SEGMENTS = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
_SEGMENT = ("1m", "UCX's 8 KiB make reads over TCP 2.4 to 4.5 times slower; the same on both ends")
_TCP = {
    **dict.fromkeys(_SEGMENTS, _SEGMENT),
    "UCX_TCP_KEEPIDLE": ("2.5s", "with the next two: a host that vanished without a word ends reads after 5 s"),
    "UCX_TCP_KEEPINTVL": ("1s", "see UCX_TCP_KEEPIDLE; UCX's own let a read wait for minutes"),
    "UCX_TCP_KEEPCNT": ("3", "see UCX_TCP_KEEPIDLE"),
    "UCX_TCP_CONN_NB": ("y", "otherwise a peer or rail that is silent stops the transfer thread for two minutes"),
    "UCX_TCP_SNDBUF": (
        "512k",
        "a source that can't put a whole segment into its socket rarely dies of its reader's death",
    ),
}
"""For every machine: TCP is the lane where there is no other. Measured in docs/decisions/0015."""
_GPU = {
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": (
        "on",
        "without NVLink UCX switches reads between two GPUs of a host off (auto), and they go through host memory",
    )
}


def tuning(found: Devices, environ: Mapping[str, str] = os.environ) -> tuple[Setting, ...]:
    """Our choices first, then what else the operator has set of UCX, by name."""
    wanted = {**_TCP, **(_GPU if found.gpus else {})}
    return (*_chosen(wanted, environ), *_others(wanted, environ))


def missing(settings: tuple[Setting, ...]) -> dict[str, str]:
    """Variables to set around making an agent: our choices where the operator made none."""
    return {setting.name: setting.value for setting in settings if setting.source == "chosen"}


def shown(settings: tuple[Setting, ...]) -> str:
    """One line for the log."""
    return " ".join(
        f"{setting.name.removeprefix(PREFIX)}={setting.value}" + (" (yours)" if setting.source == "operator" else "")
        for setting in settings
    )


def allow(*, tls: str, net_devices: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Transports and network devices from a node's configuration, as if the operator had set them there; those in the
    environment stay. Empty: all."""
    for name, value in (("UCX_TLS", tls), (NET_DEVICES, net_devices)):
        if value:
            environ.setdefault(name, value)


def tcp_segments(environ: Mapping[str, str] = os.environ) -> str:
    """The settings that both ends must share: a longer segment than the receiver expects breaks its connection, or
    its memory."""
    return ",".join(f"{name}={environ.get(name, _SEGMENT[0])}" for name in _SEGMENTS)


def _chosen(wanted: Mapping[str, tuple[str, str]], environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, (value, reason) in wanted.items():
        own = environ.get(name)
        yield Setting(name, value if own is None else own, reason, "chosen" if own is None else "operator", value)


def _others(wanted: Mapping[str, tuple[str, str]], environ: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in wanted:
            yield Setting(name, environ[name], "", "operator")
