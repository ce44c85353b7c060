"""Segments, placements and pool maps: every byte of every page has exactly one place."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import ModelShape, load_config, model_shape
from pdkv.geometry.page_layout import (
    Group,
    PageFormat,
    Placement,
    PoolMap,
    Region,
    layer_major,
    page_format,
    page_major,
    pool_map,
)

GLM = model_shape(load_config("glm-5.3"))
MTP = model_shape(load_config("glm-5.3-mtp"))
TINY = model_shape(load_config("tiny"))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    shared = draw(st.lists(st.sampled_from(["full", "shared"]), max_size=8))
    return replace(
        TINY,
        num_layers=1 + len(shared),
        indexer_types=("full", *shared),
        draft_layers=draw(st.integers(0, 2)),
        index_kpool=draw(st.sampled_from([1, 2, 4])),
    )


def addresses(placement: Placement, start: int = 1 << 20) -> list[int]:
    """Buffers one after the other."""
    found = []
    for length in placement.buffer_bytes:
        found.append(start)
        start += length
    return found


def mapped(fmt: PageFormat, placement: Placement) -> PoolMap:
    return pool_map(fmt, placement, addresses(placement), 4096, 64, "DRAM", 0)


def test_names_and_order() -> None:
    names = [s.name for s in page_format(MTP).segments]
    assert len(names) == 101
    assert names[:2] == ["main.0", "main.1"]
    assert names[77:81] == ["main.77", "draft_main.78", "index.0", "index.1"]
    assert names[-2:] == ["index.74", "draft_index.78"]


def test_page_of_glm() -> None:
    fmt = page_format(GLM)
    assert (fmt.page_bytes, fmt.main_bytes, fmt.index_bytes) == (3_452_160, 3_274_752, 177_408)
    assert (fmt.page_tokens, fmt.index_tokens) == (64, 64)
    assert fmt.segment("index.6").length == 8448
    assert fmt.segment("index.0").offset == fmt.main_bytes


@given(shapes(), st.sampled_from(["fp8_ds_mla", "fp8", "bf16", "nvfp4"]))
def test_segments_tile_the_page_and_groups_are_runs(shape: ModelShape, row: str) -> None:
    fmt = page_format(shape, main_row=row)
    end = 0
    for segment in fmt.segments:
        assert segment.offset == end
        end += segment.length
    assert end == fmt.page_bytes
    groups = [s.group for s in fmt.segments]
    assert groups == sorted(groups, key=[Group.MAIN, Group.INDEX].index)
    for group in Group:
        for segment in fmt.group_segments(group):
            assert segment == fmt.segment(segment.name)
            assert segment.pending or segment == fmt.layer_segment(group, segment.layer)


def test_lookups_that_fail_say_what_there_is() -> None:
    fmt = page_format(TINY)
    with pytest.raises(ConfigError, match=r"index\.3.*main\.0"):
        fmt.segment("index.3")
    with pytest.raises(ConfigError, match=r"layer with index rows: 3 .*\[0, 1, 2, 6\]"):
        fmt.layer_segment(Group.INDEX, 3)


@pytest.mark.parametrize(
    ("shape", "tokens", "row", "field"),
    [
        (GLM, 32, "fp8_ds_mla", "page_tokens"),
        (replace(GLM, index_kpool=2), 64, "fp8_ds_mla", "page_tokens"),
        (GLM, None, "int8", "main_row"),
        (replace(GLM, kv_lora_rank=256), None, "fp8_ds_mla", "kv_lora_rank"),
        (replace(GLM, rope_dim=32), None, "fp8_ds_mla", "qk_rope_head_dim"),
        (replace(GLM, index_head_dim=64), None, "fp8_ds_mla", "index_head_dim"),
    ],
)
def test_formats_that_do_not_fit_the_model(shape: ModelShape, tokens: int | None, row: str, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        page_format(shape, main_row=row, page_tokens=tokens)
    assert error.value.fields["field"] == field


def test_page_of_a_pooled_index() -> None:
    fmt = page_format(replace(GLM, index_kpool=2), page_tokens=128)
    assert (fmt.page_tokens, fmt.index_tokens, fmt.kpool) == (128, 64, 2)
    assert fmt.segment("index.74").length == 8448
    assert fmt.index_bytes == 177_408 + 21 * 256  # one pending key of 128 bfloat16 a full layer


@pytest.mark.parametrize(("kpool", "rollback", "rows"), [(1, 0, 0), (1, 7, 0), (2, 0, 1), (4, 0, 3), (4, 5, 8)])
def test_pending_keys_of_a_pooled_index(kpool: int, rollback: int, rows: int) -> None:
    fmt = page_format(replace(MTP, index_kpool=kpool), rollback_tokens=rollback)
    pending = [s for s in fmt.segments if s.pending]
    assert fmt.pending_rows == rows
    assert [s.length for s in pending] == [256 * rows] * (22 if rows else 0)
    assert [s.layer for s in pending] == ([*MTP.full_layers, 78] if rows else [])
    assert fmt.segments[len(fmt.segments) - len(pending) :] == tuple(pending)
    assert all(s.group is Group.INDEX for s in pending)


@pytest.mark.parametrize(("kpool", "rollback"), [(1, -1), (2, 127), (2, -1), (4, 253)])
def test_a_page_can_t_keep_more_keys_than_it_has_tokens(kpool: int, rollback: int) -> None:
    with pytest.raises(ConfigError, match="rollback_tokens"):
        page_format(replace(GLM, index_kpool=kpool), rollback_tokens=rollback)


@given(shapes(), st.sampled_from([page_major, layer_major]), st.integers(2, 5))
def test_every_byte_has_one_place(shape: ModelShape, place: object, pages: int) -> None:
    fmt = page_format(shape)
    placement = page_major(fmt, pages) if place is page_major else layer_major(fmt, pages)
    assert sum(placement.buffer_bytes) == pages * fmt.page_bytes
    pool = mapped(fmt, placement)
    runs = sorted((s.base + p * s.stride, s.length) for s in pool.segments for p in range(pages))
    assert sum(length for _, length in runs) == pages * fmt.page_bytes
    end = 1 << 20
    for start, length in runs:
        assert start == end
        end += length
    assert [(s.name, s.length) for s in pool.segments] == [(s.name, s.length) for s in fmt.segments]


def test_page_major_is_one_region() -> None:
    fmt = page_format(GLM)
    pool = mapped(fmt, page_major(fmt, 3))
    assert pool.regions == (Region(1 << 20, 3 * fmt.page_bytes),)
    assert {s.stride for s in pool.segments} == {fmt.page_bytes}
    assert pool.table_region == Region(4096, 3 * 64)


def test_layer_major_keeps_buffers_aligned_with_layers() -> None:
    fmt = page_format(MTP)
    placement = layer_major(fmt, 3)
    main, index = placement.buffer_bytes[:79], placement.buffer_bytes[79:]
    assert set(main) == {3 * 64 * 656}
    assert [i for i, length in enumerate(index) if length] == [*MTP.full_layers, 78]
    assert set(index) == {0, 3 * 8448}
    for segment, at in zip(fmt.segments, placement.places, strict=True):
        assert at.buffer == segment.layer + (79 if segment.group is Group.INDEX else 0)
    assert len(mapped(fmt, placement).regions) == 101


def test_layer_major_pending_keys_are_buffers_of_their_own() -> None:
    fmt = page_format(replace(MTP, index_kpool=2))
    pending = layer_major(fmt, 3).buffer_bytes[2 * 79 :]
    assert [i for i, length in enumerate(pending) if length] == [*MTP.full_layers, 78]
    assert set(pending) == {0, 3 * 256}


@pytest.mark.parametrize("place", [page_major, layer_major])
@pytest.mark.parametrize("pages", [-1, 0, 1])
def test_a_pool_has_a_page_beside_the_sink(place: object, pages: int) -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        (page_major if place is page_major else layer_major)(page_format(TINY), pages)


def test_one_address_a_buffer() -> None:
    fmt = page_format(TINY)
    with pytest.raises(BoundsError, match="buffer addresses: 2; allowed: 1"):
        pool_map(fmt, page_major(fmt, 2), [1, 2], 4096, 64, "DRAM", 0)


def test_a_pool_map_that_leaves_its_regions_is_refused() -> None:
    fmt = page_format(TINY)
    good = mapped(fmt, layer_major(fmt, 4))
    first, *rest = good.segments
    for bad in (
        {"num_pages": 1},
        {"num_pages": 5},
        {"regions": good.regions[1:]},
        {"segments": (replace(first, base=first.base - 1), *rest)},
        {"segments": (replace(first, base=first.base + 1), *rest)},
        {"segments": (replace(first, stride=first.length - 1), *rest)},
        {"segments": (replace(first, stride=first.stride + 1), *rest)},
        {"segments": (replace(first, length=0, stride=0), *rest)},
    ):
        with pytest.raises(BoundsError):
            replace(good, **bad)
    assert replace(good) == good
