"""Rows of both caches as bytes, and back.

Guarantees: the bytes are those of `geometry.row_format`; encoding rounds to nearest even and never writes a NaN for
a finite input; decoding is exact in float32 for every byte, also for bytes that no encoder writes; nothing here loops
over tokens. Index-K keys use the scale rule of the main rows when that has one, else "amax/448".
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdkv.errors import ConfigError
from pdkv.geometry.row_format import RowFormat

E4M3_MAX = 448.0
RAW = "amax/448"
POWER_OF_TWO = "amax/448,pow2"
SCALE_RULES = (RAW, POWER_OF_TWO)

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A group of zeros still needs a scale to divide by: the smallest normal float, as in vLLM's kernel for these rows."""
_PART_DTYPES = {"e4m3": torch.uint8, "bf16": torch.bfloat16}


def to_e4m3(values: Tensor) -> Tensor:
    """uint8 codes of `values` (any shape), saturated to +-448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """float32 values of uint8 `codes`, exact; 0x7f and 0xff are NaN.

    An e4m3 pattern moved under float16's wider exponent is the same number times 2**-8, subnormals included: five times
    faster than torch's own conversion, which would cost most of a decode step.
    """
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    # only the two NaN patterns carry into bit 14, which makes them float16's NaN
    half.bitwise_or_((half + 0x80).bitwise_and_(0x4000))
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


def scales_of(groups: Tensor, rule: str) -> Tensor:
    """float32 [..., 1] scales of float32 [..., n] groups, so that the largest magnitude of each maps to at most 448."""
    scale = (groups.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_(min=_SMALLEST_SCALE)
    if rule == POWER_OF_TWO:
        # rounds a normal float up to a power of two: carry any mantissa bit into the exponent, drop the mantissa
        return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def encode_keys(keys: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """uint8 [n, 128] codes and float32 [n, 1] scales of index keys [n, 128]."""
    exact = keys.float()
    scale = scales_of(exact, rule)
    return to_e4m3(exact / scale), scale


def decode_keys(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., 128] keys from uint8 codes and float32 [..., 1] scales."""
    return from_e4m3(codes).mul_(scales)


class MainRows:
    """Encoder and decoder of one main row format. Raises `ConfigError` for a format that it can't write."""

    def __init__(self, fmt: RowFormat) -> None:
        dtypes = {p.name: p.dtype for p in fmt.parts}
        scaled = dtypes == {"latent": "e4m3", "scale": "f32", "rope": "bf16"}
        if not scaled and dtypes not in ({"latent": d, "rope": d} for d in _PART_DTYPES):
            raise ConfigError("main row format", fmt.name, "fp8_ds_mla, fp8 or bf16")
        rules = SCALE_RULES if scaled else ("none",)
        if fmt.scale_rule not in rules:
            raise ConfigError(f"scale rule of {fmt.name} rows", fmt.scale_rule, ", ".join(rules))
        if fmt.rope_order != "halves":
            raise ConfigError("RoPE order of the main rows", fmt.rope_order, "halves, as transformers rotates")
        self.index_rule = fmt.scale_rule if scaled else RAW
        self._fmt = fmt
        self._scaled = scaled

    def encode(self, latent: Tensor, rope: Tensor) -> Tensor:
        """uint8 [n, row_bytes] from [n, latents] and [n, rope] of any float type."""
        fmt = self._fmt
        rows = torch.empty((latent.shape[0], fmt.row_bytes), dtype=torch.uint8, device=latent.device)
        if self._scaled:
            groups = latent.float().view(latent.shape[0], fmt.part("scale").count, -1)
            scale = scales_of(groups, fmt.scale_rule)
            self._field(rows, "scale", torch.float32).copy_(scale.squeeze(-1))
            latent = (groups / scale).flatten(-2)
        for name, values in (("latent", latent), ("rope", rope)):
            dtype = _PART_DTYPES[fmt.part(name).dtype]
            self._field(rows, name, dtype).copy_(to_e4m3(values.float()) if dtype is torch.uint8 else values)
        return rows

    def decode(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents [..., n] and RoPE parts [..., m] of `dtype` from uint8 [..., row_bytes]."""
        latent, rope = (self._values(rows, name) for name in ("latent", "rope"))
        if self._scaled:
            scale = self._field(rows, "scale", torch.float32)
            latent.view(*scale.shape, -1).mul_(scale.unsqueeze(-1))
        return latent.to(dtype), rope.to(dtype)

    def _values(self, rows: Tensor, name: str) -> Tensor:
        stored = self._field(rows, name, _PART_DTYPES[self._fmt.part(name).dtype])
        return from_e4m3(stored) if stored.dtype is torch.uint8 else stored

    def _field(self, rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        return rows[..., self._fmt.part_slice(name)].view(dtype)
