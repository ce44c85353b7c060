"""Row formats: bytes by value."""

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.row_format import INDEX_FP8, MAIN_ROWS, RowPart, main_row_format


@pytest.mark.parametrize(("name", "bytes_"), [("fp8_ds_mla", 656), ("fp8", 576), ("bf16", 1152), ("nvfp4", 352)])
def test_row_bytes(name: str, bytes_: int) -> None:
    assert MAIN_ROWS[name].row_bytes == bytes_
    assert main_row_format(name) is MAIN_ROWS[name]


def test_parts_of_the_656_byte_row() -> None:
    row = MAIN_ROWS["fp8_ds_mla"]
    assert row.part_slice("latent") == slice(0, 512)
    assert row.part_slice("scale") == slice(512, 528)
    assert row.part_slice("rope") == slice(528, 656)


@pytest.mark.parametrize("name", MAIN_ROWS)
def test_parts_tile_the_row(name: str) -> None:
    row = MAIN_ROWS[name]
    covered = [b for part in row.parts for b in range(row.row_bytes)[row.part_slice(part.name)]]
    assert covered == list(range(row.row_bytes))


def test_index_row() -> None:
    assert (INDEX_FP8.row_bytes, INDEX_FP8.order) == (132, "keys_then_scales")


def test_half_byte_elements() -> None:
    assert RowPart("latent", 512, "e2m1").bytes == 256


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fp4'.*fp8_ds_mla"):
        main_row_format("fp4")
    with pytest.raises(ConfigError, match=r"'scale'.*latent, rope"):
        MAIN_ROWS["bf16"].part_slice("scale")
