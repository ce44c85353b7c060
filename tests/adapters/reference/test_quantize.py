import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdkv.adapters.reference.quantize import MainRows, decode_keys, encode_keys, from_e4m3, scales_of, to_e4m3
from pdkv.errors import ConfigError
from pdkv.geometry.row_format import MAIN_ROWS

SCALED = MAIN_ROWS["fp8_ds_mla"]
POW2 = replace(SCALED, scale_rule="amax/448,pow2")
TINY = 2.0**-126


def test_every_e4m3_byte_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    ours = from_e4m3(codes)
    nan = theirs.isnan()
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))  # zeros keep their sign


def test_encoding_saturates_and_never_makes_a_nan() -> None:
    codes = to_e4m3(torch.tensor([449.0, 1e9, -1e9, 448.0, 0.0]))
    assert codes.tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0x00]


def test_a_row_has_its_parts_where_the_format_says() -> None:
    latent = torch.zeros(1, 512)
    latent[0, 0] = 448.0  # group 0: scale 1
    latent[0, 128:256] = -896.0  # group 1: scale 2
    latent[0, 300] = 500.0  # group 2: scale 500/448; group 3 is all zeros
    rope = torch.zeros(1, 64)
    rope[0, 63] = 1.0
    row = bytes(MainRows(SCALED).encode(latent, rope)[0].tolist())
    assert len(row) == 656
    assert row[0] == 0x7E
    assert set(row[128:256]) == {0xFE}
    assert row[300] == 0x7E
    assert set(row[384:512]) == {0}
    assert row[512:528] == struct.pack("<4f", 1.0, 2.0, np.float32(500.0) / np.float32(448.0), TINY)
    assert row[528:654] == bytes(126)
    assert row[654:656] == b"\x80\x3f"  # 1.0 in bfloat16


def test_power_of_two_scales_have_the_same_size_and_other_bytes() -> None:
    latent = torch.linspace(-500, 500, 512)[None]
    rope = torch.zeros(1, 64)
    raw, rounded = (MainRows(fmt).encode(latent, rope) for fmt in (SCALED, POW2))
    assert raw.shape == rounded.shape
    assert not torch.equal(raw, rounded)
    scales = rounded[0, 512:528].view(torch.float32)
    assert scales.tolist() == [2.0, 1.0, 1.0, 2.0]  # 500/448 and 250/448 rounded up


@given(st.floats(TINY, 2.0**100, width=32))
def test_power_of_two_scale_is_the_next_power_of_two(amax: float) -> None:
    raw = scales_of(torch.tensor([[amax]]), "amax/448").item()
    rounded = scales_of(torch.tensor([[amax]]), "amax/448,pow2").item()
    assert rounded >= raw
    assert rounded < 2 * raw
    assert np.frexp(rounded)[0] == 0.5


@given(st.integers(0, 2**32 - 1), st.floats(-20, 20), st.sampled_from([SCALED, POW2]))
def test_a_decoded_latent_is_within_half_a_step(seed: int, log_size: float, fmt: object) -> None:
    rng = torch.Generator().manual_seed(seed)
    latent = torch.randn(3, 512, generator=rng) * 2.0**log_size
    rope = torch.randn(3, 64, generator=rng)
    rows = MainRows(fmt)
    got_latent, got_rope = rows.decode(rows.encode(latent, rope), torch.float32)
    # 3 mantissa bits: half a step is 1/16 of the value; below the smallest normal, half a subnormal step of the scale
    scale = scales_of(latent.view(3, 4, 128), fmt.scale_rule).expand(3, 4, 128).reshape(3, 512)
    assert ((got_latent - latent).abs() <= torch.maximum(latent.abs() / 16, scale * 2.0**-10) * 1.0001).all()
    assert torch.equal(got_rope, rope.bfloat16().float())


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_unscaled_rows(name: str) -> None:
    fmt = MAIN_ROWS[name]
    dtype = torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn
    latent, rope = torch.randn(5, 512), torch.randn(5, 64)
    stored = MainRows(fmt).encode(latent, rope)
    assert stored.shape == (5, fmt.row_bytes)
    got = MainRows(fmt).decode(stored, torch.float32)
    assert torch.equal(got[0], latent.to(dtype).float())
    assert torch.equal(got[1], rope.to(dtype).float())


@pytest.mark.parametrize("rule", ["amax/448", "amax/448,pow2"])
def test_index_keys_have_one_scale_each(rule: str) -> None:
    keys = torch.stack([torch.full((128,), 448.0), torch.linspace(-3, 3, 128), torch.zeros(128)])
    codes, scales = encode_keys(keys, rule)
    assert codes.shape == (3, 128)
    assert scales.shape == (3, 1)
    assert scales[0].item() == 1.0
    assert (decode_keys(codes, scales) - keys).abs().max() <= 3 / 16
    assert torch.equal(decode_keys(codes, scales)[2], keys[2])


@pytest.mark.parametrize(
    ("fmt", "named"),
    [
        (MAIN_ROWS["nvfp4"], "nvfp4"),
        (replace(SCALED, scale_rule="amax/6"), "amax/6"),
        (replace(MAIN_ROWS["fp8"], scale_rule="amax/448"), "amax/448"),
        (replace(SCALED, rope_order="interleaved"), "interleaved"),
    ],
)
def test_a_format_it_cannot_write_is_refused_by_name(fmt: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MainRows(fmt)
