"""Backends by name. Guarantees: nixl is imported only when it is asked for."""

from __future__ import annotations

from functools import partial

from pdkv.errors import ConfigError
from pdkv.transfer.backends.base import BackendFactory
from pdkv.transfer.backends.loopback import LoopbackNet

PROCESS_NET = LoopbackNet()
"""Where the loopback agents of this process meet unless a test makes a net of its own."""


def backend_factory(kind: str, device: str = "") -> BackendFactory:
    """ "nixl" or "loopback"; `device`: the only network device that may be used, if one is named.

    Raises `ConfigError` for another name, `MissingDependency` without nixl.
    """
    if kind == "nixl":
        from pdkv.transfer.backends.nixl import NixlBackend

        return partial(NixlBackend, device=device) if device else NixlBackend
    if kind == "loopback":
        return PROCESS_NET.backend
    raise ConfigError("transfer backend", kind, "nixl, loopback")
