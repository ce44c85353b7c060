"""Memory that was freed stays with the process.

Guarantees: where the C library is glibc, blocks below `BLOCK_BYTES` come from its heap, and what is freed at the heap's
end goes back to the kernel only beyond `KEPT_BYTES`; elsewhere nothing is done, and that is said.

A prompt of a million tokens is 4 MiB in each of the forms that it takes on its way: as it comes from a socket, in its
message, as a column. By default glibc asks the kernel for every such block and gives it back at once, and the kernel
clears a thousand pages for each: ten times the work of the copy itself.
"""

from __future__ import annotations

import ctypes

BLOCK_BYTES = 32 << 20
"""The most that glibc allows."""
KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed() -> bool:
    """For the rest of the process's life. False if the C library can't be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
