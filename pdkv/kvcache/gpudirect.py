"""Makes what a NIC wrote into GPU memory visible to kernels that start afterwards.

Guarantees: after `flush`, a kernel sees every byte of a read that had ended before the call, where the platform or the
driver can promise it at all; where neither can, that is said once in the log, by the device's name.

Why: nothing orders a NIC's writes into GPU memory (GPUDirect RDMA) and the GPU's own loads. A read that ended is
complete in the PCIe fabric, not yet for a kernel. A digest that comes too early finds old bytes: it fails, and never
passes by mistake, so a missing flush costs reads and not correctness. CUDA says by an attribute whether the platform
orders such writes by itself; otherwise `cudaDeviceFlushGPUDirectRDMAWrites` does.
"""

from __future__ import annotations

import ctypes
import logging
from enum import Enum
from functools import cache

import torch

logger = logging.getLogger(__name__)

_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118
"""cudaDevAttrGPUDirectRDMAFlushWritesOptions and -WritesOrdering (driver_types.h, CUDA 11.3)."""
_BY_HOST = 1
"""cudaFlushGPUDirectRDMAWritesOptionHost."""
_TO_OWNER = 100
"""cudaFlushGPUDirectRDMAWritesToOwner, and the smallest ordering that makes a flush needless."""
_CURRENT_DEVICE = 0
"""cudaFlushGPUDirectRDMAWritesTargetCurrentDevice."""


class Flush(Enum):
    """What stands between a NIC's write and a kernel's load on one device."""

    ORDERED = "ordered by the platform"
    CALLED = "flushed by the driver"
    MISSING = "not ordered"


def flush(device: torch.device) -> None:
    """Call it after reads into the device's memory have ended, before a kernel that looks at them."""
    if flush_of(device) is Flush.CALLED:
        runtime = _runtime()
        # the calling thread's device, which it works on anyway
        error = runtime.cudaSetDevice(device.index or 0)
        error = error or runtime.cudaDeviceFlushGPUDirectRDMAWrites(_CURRENT_DEVICE, _TO_OWNER)
        if error:
            logger.warning("writes into %s could not be flushed (CUDA error %d): digests may fail", device, error)


@cache
def flush_of(device: torch.device) -> Flush:
    """Asked of CUDA once. MISSING, with a warning, where the runtime can't say either."""
    try:
        ordering, options = (_attribute(device, number) for number in (_WRITES_ORDERING, _FLUSH_OPTIONS))
    except (OSError, AttributeError, ValueError) as error:
        logger.warning("%s: CUDA doesn't say how a NIC's writes are ordered (%s): digests may fail", device, error)
        return Flush.MISSING
    if ordering >= _TO_OWNER:
        return Flush.ORDERED
    if options & _BY_HOST:
        return Flush.CALLED
    logger.warning("%s neither orders a NIC's writes nor lets them be flushed: digests may fail", device)
    return Flush.MISSING


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch uses. Raises `OSError` without one."""
    version = torch.version.cuda
    if version is None:
        raise OSError("torch was built without CUDA")
    return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")


def _attribute(device: torch.device, number: int) -> int:
    value = ctypes.c_int()
    error = _runtime().cudaDeviceGetAttribute(ctypes.byref(value), number, device.index or 0)
    if error:
        raise ValueError(f"CUDA error {error} for device attribute {number}")
    return value.value
