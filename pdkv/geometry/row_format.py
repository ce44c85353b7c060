"""Byte layout of one token's row in either cache.

Guarantees: a format is spelled out by value (parts, order, scale rule), never by the name of a dtype alone, because the
roles of a deployment resolve "fp8" differently; `row_bytes` is always the sum of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

DTYPE_BITS = {"e2m1": 4, "e4m3": 8, "u8": 8, "bf16": 16, "f32": 32}
"""Width of each element type that a row may hold; "u8" is a byte of a row that only its engine understands."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """A run of `count` elements of one dtype (a key of `DTYPE_BITS`)."""

    name: str
    count: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.count * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A main-KV row: parts in byte order, how its scales are computed, and the order of the RoPE elements.

    `scale_rule`: "none"; "amax/448" (float32, one a group of 128 latents, as it comes); "amax/448,pow2" (rounded up
    to a power of two); "amax/6" (e4m3, one a group of 16). `rope_order`: "halves" (all first elements of the rotated
    pairs, then all second ones) or "interleaved" (pair by pair).
    """

    name: str
    parts: tuple[RowPart, ...]
    scale_rule: str
    rope_order: str

    @property
    def row_bytes(self) -> int:
        return sum(p.bytes for p in self.parts)

    def part(self, name: str) -> RowPart:
        """Raises `ConfigError` if the row has no such part."""
        for part in self.parts:
            if part.name == name:
                return part
        raise ConfigError(f"part of row format {self.name}", name, ", ".join(p.name for p in self.parts))

    def part_slice(self, name: str) -> slice:
        """Byte range of a part within the row. Raises `ConfigError` if the row has no such part."""
        wanted = self.part(name)
        start = sum(p.bytes for p in self.parts[: self.parts.index(wanted)])
        return slice(start, start + wanted.bytes)


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """An index-K row; a page holds all its keys, then all its scales, so a row is *not* contiguous in a page."""

    name: str
    key_bytes: int = 128
    scale_bytes: int = 4
    order: str = "keys_then_scales"

    @property
    def row_bytes(self) -> int:
        return self.key_bytes + self.scale_bytes


def _row(name: str, scale_rule: str, *parts: RowPart) -> RowFormat:
    return RowFormat(name, parts, scale_rule, rope_order="halves")


MAIN_ROWS: dict[str, RowFormat] = {
    row.name: row
    for row in (
        # 512 + 4*4 + 64*2 = 656
        _row(
            "fp8_ds_mla",
            "amax/448",
            RowPart("latent", 512, "e4m3"),
            RowPart("scale", 4, "f32"),
            RowPart("rope", 64, "bf16"),
        ),
        # 512 + 64 = 576
        _row("fp8", "none", RowPart("latent", 512, "e4m3"), RowPart("rope", 64, "e4m3")),
        # 512*2 + 64*2 = 1152
        _row("bf16", "none", RowPart("latent", 512, "bf16"), RowPart("rope", 64, "bf16")),
        # 512/2 + 512/16 + 64 = 352
        _row(
            "nvfp4",
            "amax/6",
            RowPart("latent", 512, "e2m1"),
            RowPart("scale", 32, "e4m3"),
            RowPart("rope", 64, "e4m3"),
        ),
    )
}
"""Main-KV rows in use, by name: 656, 576, 1,152 and 352 bytes."""

INDEX_FP8 = IndexFormat("fp8_e4m3_f32")
"""128 e4m3 key elements and one float32 scale: 132 bytes."""

PENDING_KEY = RowPart("key", 128, "bf16")
"""An index key that waits, unquantised as the projection gives it, until its window of kpool tokens is whole."""


def main_row_format(name: str) -> RowFormat:
    """Raises `ConfigError` for a name that is not in `MAIN_ROWS`."""
    if name not in MAIN_ROWS:
        raise ConfigError("main_row", name, ", ".join(MAIN_ROWS))
    return MAIN_ROWS[name]
