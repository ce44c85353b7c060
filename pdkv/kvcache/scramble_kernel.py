"""The sequential part of xxh3 as one kernel, in Triton, which comes with torch for CUDA.

Guarantees: as `device_digest.scramble`, which checks it before it is used. Raises `ImportError` without Triton.
"""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

ERRORS = (TritonError, RuntimeError, OSError, subprocess.CalledProcessError)
"""What making or starting the kernel raises where there is no compiler for it."""
_ROWS = tl.constexpr(4)
"""Pages of one program: few, so that a small batch has many."""


def scramble(lanes: torch.Tensor, added: torch.Tensor, key: torch.Tensor, prime: int) -> None:
    """In place: int64 lanes [n, 8], after the blocks of `added` [n, blocks, 8], contiguous."""
    count, blocks, _ = added.shape
    with torch.cuda.device_of(lanes):  # type: ignore[no-untyped-call]
        _kernel[(triton.cdiv(count, _ROWS.value),)](lanes, added, key, blocks, count, prime)


@triton.jit
def _kernel(lanes_at, added_at, key_at, blocks, count, prime):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * _ROWS + tl.arange(0, _ROWS))[:, None].to(tl.int64)
    lane = tl.arange(0, 8)[None, :]
    inside = row < count
    lanes = tl.load(lanes_at + row * 8 + lane, mask=inside)
    key = tl.load(key_at + lane)
    for block in range(blocks):
        lanes += tl.load(added_at + (row * blocks + block) * 8 + lane, mask=inside)
        lanes ^= (lanes >> 47) & 0x1FFFF
        lanes ^= key
        lanes *= prime
    tl.store(lanes_at + row * 8 + lane, lanes, mask=inside)
