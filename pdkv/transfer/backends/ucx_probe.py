"""Asks the UCX that NIXL brings for its version and for the devices that it would use, in a process of its own.

Guarantees: an agent was really made there, with the settings that a node's gets; whatever UCX does to that process, the
caller gets an answer or a named error that says how it ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pdkv.errors import PdkvError, TransferError
from pdkv.machine.devices import devices
from pdkv.transfer.backends.ucx_settings import missing, tuning

PROBE_S = 60.0
"""Most of it is importing."""
_RMA = 1 << 1
"""UCP_FEATURE_RMA; of the fields of ucp_params_t, `features` is the second one and bit 0 of the mask, the first."""
_PARAMS_WORDS = 64
_RESOURCE = re.compile(r"resource\s+\d+\s+:.*\s([a-z]\w*)/([\w.:-]+)")


@dataclass(frozen=True, slots=True)
class UcxFacts:
    version: str
    library: str
    """Path of libucp."""
    resources: tuple[tuple[str, str], ...]
    """(transport, device), as ("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1"), ("cma", "memory")."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names without a port, each once."""
        return tuple(dict.fromkeys(device.partition(":")[0] for _, device in self.resources))


def ask_ucx(command: Sequence[str] = (sys.executable, "-m", __name__)) -> UcxFacts:
    """Raises `TransferError` saying how the process ended, if it didn't answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise TransferError(f"UCX didn't start within {PROBE_S:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise TransferError(f"UCX ended its process by {name} when an agent was made", signal=name)
    if done.returncode or not lines:
        words = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise TransferError(f"UCX can't be used: {words}", exit=done.returncode)
    answer = json.loads(lines[-1])
    return UcxFacts(answer["version"], answer["library"], tuple((t, d) for t, d in answer["resources"]))


def resources(printed: str) -> tuple[tuple[str, str], ...]:
    """From what `ucp_context_print_info` writes."""
    return tuple((found[1], found[2]) for found in map(_RESOURCE.search, printed.splitlines()) if found)


def _answer() -> UcxFacts:
    from pdkv.transfer.backends.base import AgentName
    from pdkv.transfer.backends.nixl import NixlBackend

    agent = NixlBackend(AgentName(f"probe-{os.getpid()}"))
    with open("/proc/self/maps") as maps:
        library = next(path for line in maps if "/libucp" in (path := line.split()[-1]))
    ucp = ctypes.CDLL(library)
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    os.environ.update(missing(tuning(devices())))
    printed = _context(ucp)
    agent.close()
    return UcxFacts(ucp.ucp_get_version_string().decode(), library, resources(printed))


def _context(ucp: ctypes.CDLL) -> str:
    """What a context for reads says of itself. Raises `TransferError` if there can be none."""
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, numbers))
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(1, _RMA)
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    status = ucp.ucp_config_read(None, None, ctypes.byref(config))
    status = status or ucp.ucp_init_version(numbers[0], numbers[1], params, config, ctypes.byref(context))
    if status:
        ucp.ucs_status_string.restype = ctypes.c_char_p
        raise TransferError(f"UCX makes no context: {ucp.ucs_status_string(status).decode()}")
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile("w+") as file:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        file.seek(0)
        printed = file.read()
    ucp.ucp_cleanup(context)
    return printed


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_answer())), flush=True)
    except PdkvError as error:
        sys.exit(f"{error.kind}: {error}")
