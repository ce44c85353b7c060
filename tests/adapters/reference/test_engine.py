import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel, load_model
from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import FULL, SHARED
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.sampling import logits_digest
from tests.adapters.reference.runs import Run

Prompt = Callable[[int], np.ndarray]
NewRun = Callable[..., Run]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


# --- what the bytes in the pages decide -------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["page_major", "layer_major"])
def test_decode_on_received_bytes_is_the_single_process_bit_for_bit(
    run: NewRun, prompt: Prompt, placement: str
) -> None:
    tokens = prompt(1300)
    here, there = run(), run(placement=placement, page_seed=9)
    assert here.pages != there.pages
    first = here.prefill(tokens)
    here.copy_to(there, 21)
    want_tokens, want = here.decode(first, 1300, 8)
    got_tokens, got = there.decode(first, 1300, 8)
    assert got_tokens == want_tokens
    assert same(got, want)


@pytest.mark.parametrize("group", list(Group))
def test_a_flipped_bit_in_each_row_is_seen(run: NewRun, prompt: Prompt, group: Group) -> None:
    tokens = prompt(500)
    here, there = run(), run(page_seed=3)
    first = here.prefill(tokens)
    here.copy_to(there, 8)
    first_layer = there.pool.group_bytes(there.pages.array[2].item(), group)[0]
    first_layer[:: 656 if group is Group.MAIN else 128] ^= 0x80  # a sign
    assert not same(here.decode(first, 500, 3)[1], there.decode(first, 500, 3)[1])


def test_placement_does_not_matter(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(1100)
    runs = [run(), run(placement="layer_major", page_seed=5)]
    assert same([runs[0].prefill(tokens)], [runs[1].prefill(tokens)])
    for mine, theirs in zip(runs[0].pages[:18], runs[1].pages[:18], strict=True):
        for group in Group:
            a, b = (np.concatenate(r.pool.group_bytes(p, group)) for r, p in zip(runs, (mine, theirs), strict=True))
            assert np.array_equal(a, b)


def test_verifying_is_forward_token_by_token_bit_for_bit(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(140)
    one, all_at_once, chunk = run(), run(page_seed=2), run(page_seed=3)
    for r in (one, all_at_once, chunk):
        r.prefill(tokens[:130])
    want = [one.engine.forward(tokens[i : i + 1], i, one.pages) for i in range(130, 140)]
    got = all_at_once.engine.verify(tokens[130:], 130, all_at_once.pages)
    assert same(list(got.logits), want)
    assert got.hidden.shape == (10, 128)
    together = chunk.engine.chunk(tokens[130:], 130, chunk.pages)
    assert (together.logits.shape, together.hidden.shape) == ((1, 257), (10, 128))
    assert not same([together.hidden], [got.hidden])  # why it goes one by one
    assert likeness(together.hidden[-1], got.hidden[-1]) > 0.99


ELSEWHERE = """
import sys
import numpy as np, torch
torch.set_num_threads(1)
from pdkv.adapters.reference.model import load_model
from pdkv.geometry.page_layout import page_format
from pdkv.kvcache.pool import SlotPool
from pdkv.node.sampling import logits_digest
from tests.adapters.reference.runs import Run
model = load_model("tiny")
run = Run(model, SlotPool.create(page_format(model.shape), 40, placement="layer_major"), page_seed=5, pages=20)
tokens = np.frombuffer(sys.stdin.buffer.read(), np.uint32)
first = run.prefill(tokens)
print([logits_digest(row) for row in (first, *run.decode(first, len(tokens), 4)[1])], run.engine.weights_id)
"""


def test_another_process_computes_the_same_bits(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(1100)
    here = run()
    first = here.prefill(tokens)
    want = [logits_digest(row) for row in (first, *here.decode(first, 1100, 4)[1])]
    other = subprocess.run([sys.executable, "-c", ELSEWHERE], input=tokens.tobytes(), capture_output=True, timeout=60)
    assert other.stdout.decode().strip() == f"{want} {here.engine.weights_id}", other.stderr.decode()


def test_chunks_and_one_piece_are_close(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(700)
    whole = run().prefill(tokens)
    for chunk in (128, 300):
        assert likeness(run().prefill(tokens, chunk), whole) > 0.99
    assert likeness(run().prefill(prompt(701)), whole) < 0.9


def test_garbage_beyond_the_length_is_never_read(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(200)
    clean, dirty = run(), run()
    for buffer in dirty.pool.memory.buffers:
        buffer.fill_(0xFF)  # NaN in every part of every row
    a, b = clean.prefill(tokens, 100), dirty.prefill(tokens, 100)
    assert np.isfinite(b).all()
    assert same([a], [b])


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 70), (70, 71), (71, 130)])
def test_only_the_rows_of_the_new_positions_are_written(run: NewRun, start: int, stop: int) -> None:
    tokens = np.arange(stop - start, dtype=np.uint32)
    r = run()
    for buffer in r.pool.memory.buffers:
        buffer.random_(0, 128)  # no NaN: the rows of [0, start) are read
    before = r.pool.memory.buffers[0].clone()
    r.engine.forward(tokens, start, r.pages)
    at = [(r.pages.array[i // 64].item(), i % 64) for i in range(start, stop)]
    page, slot = (torch.tensor(column) for column in zip(*at, strict=True))
    # the pool's views, now of which bytes changed
    r.pool.memory.buffers[0].copy_(r.pool.memory.buffers[0] != before)
    views = [r.pool.main_view(i) for i in range(8)]
    for i in r.engine.shape.full_layers:
        views += [r.pool.index_keys(i), r.pool.index_scales(i)]
    for view in views:
        assert view[page, slot].any(dim=-1).all()
        view[page, slot] = 0
    assert not r.pool.memory.buffers[0].any()


# --- it computes what transformers computes ---------------------------------------------------------------------------


def test_unquantised_rows_give_transformers_own_logits() -> None:
    """bfloat16 rows lose nothing of a bfloat16 model, and up to index_topk tokens every key is selected."""
    model = load_model("tiny", dtype="bfloat16")
    r = Run(model, SlotPool.create(page_format(model.shape, main_row="bf16"), 4), pages=3)
    tokens = np.random.default_rng(2).integers(0, 257, 60).astype(np.uint32)
    cache = DynamicCache(config=model.module.config)
    for start, stop in ((0, 40), (40, 59), (59, 60)):
        ids = torch.from_numpy(tokens[start:stop].astype(np.int64))[None]
        with torch.inference_mode():
            theirs = model.module(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].float().numpy()
        assert same([r.engine.forward(tokens[start:stop], start, r.pages)], [theirs])


def test_quantised_rows_stay_close_to_transformers_own_cache(tiny: LoadedModel, run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(400)
    with torch.inference_mode():
        theirs = tiny.module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], logits_to_keep=1).logits[0, -1]
    assert likeness(run().prefill(tokens), theirs.numpy()) > 0.9


@pytest.mark.parametrize("main_row", ["fp8", "bf16"])
def test_other_row_formats_work_alike(run: NewRun, prompt: Prompt, main_row: str) -> None:
    tokens = prompt(300)
    here, there = run(main_row=main_row), run(main_row=main_row, placement="layer_major", page_seed=4)
    first = here.prefill(tokens, 128)
    here.copy_to(there, 5)
    assert same(here.decode(first, 300, 2)[1], there.decode(first, 300, 2)[1])
    assert likeness(first, run().prefill(tokens, 128)) > 0.8


# --- negative controls: the preset must notice what a transfer can lose -----------------------------------------------


def drop_index(r: Run, pages: slice) -> None:
    for layer in r.engine.shape.full_layers:
        r.pool.index_view(layer)[torch.from_numpy(r.pages.array[pages].astype(np.int64))] = 0


@pytest.mark.parametrize("length", [1000, 1700, 4000])
def test_lost_index_k_changes_what_is_generated(run: NewRun, prompt: Prompt, length: int) -> None:
    tokens = prompt(length)
    here, all_lost, half_lost = run(), run(page_seed=1), run(page_seed=2)
    first = here.prefill(tokens)
    full = length // 64
    for other, lost in ((all_lost, slice(0, full)), (half_lost, slice(0, full // 2))):
        here.copy_to(other, full + 1)
        drop_index(other, lost)
    want, _ = here.decode(first, length, 10)
    assert all_lost.decode(first, length, 10)[0] != want
    assert half_lost.decode(first, length, 10)[0] != want
    assert len(set(want)) >= 7  # and it doesn't say one thing over and over


@pytest.mark.parametrize("lost", [0, 9, 14])
def test_one_lost_page_of_either_cache_changes_logits(run: NewRun, prompt: Prompt, lost: int) -> None:
    tokens = prompt(1000)
    here = run()
    first = here.prefill(tokens)
    want = here.decode(first, 1000, 8)[1]
    for group in Group:
        there = run(page_seed=1)
        here.copy_to(there, 16)
        for segment in there.pool.group_bytes(there.pages.array[lost].item(), group):
            segment[:] = 0
        assert not same(there.decode(first, 1000, 8)[1], want)


def test_the_first_page_matters_to_the_last_token(run: NewRun, prompt: Prompt) -> None:
    tokens = prompt(1200)
    changed = tokens.copy()
    changed[10] ^= 1
    r = run()
    assert likeness(r.prefill(tokens), r.prefill(changed)) < 0.9999


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "start", "named"),
    [
        ([257], 0, "token id: 257"),
        ([2**32 - 1], 0, "token id"),
        ([], 0, "tokens"),
        ([1, 2], -1, "positions"),
        ([1], 128, "positions"),
        ([1] * 65, 64, "positions"),
    ],
)
def test_bad_calls_are_refused_before_anything_is_written(
    run: NewRun, tokens: list[int], start: int, named: str
) -> None:
    r = run()
    with pytest.raises(BoundsError, match=named):
        r.engine.forward(np.array(tokens, np.uint32), start, r.pages[:2])
    assert not r.pool.memory.buffers[0].any()


def test_pages_of_a_larger_pool_are_refused(run: NewRun) -> None:
    with pytest.raises(BoundsError, match="page id: 500"):
        run().engine.forward(np.array([1], np.uint32), 0, LocalPages.checked([500], 501))


def test_positions_end_where_the_model_ends(tiny: LoadedModel) -> None:
    limit = tiny.max_positions
    pool = SlotPool.create(page_format(tiny.shape), limit // 64 + 3)
    engine = ReferenceEngine(tiny, pool)
    pages = LocalPages.checked(np.arange(1, limit // 64 + 2), pool.num_pages)
    with pytest.raises(BoundsError, match=f"{limit} positions"):
        engine.forward(np.array([1], np.uint32), limit, pages)


def test_engine_facts(tiny: LoadedModel, run: NewRun) -> None:
    engine = run().engine
    assert engine.shape.full_layers == (0, 1, 2, 6)
    assert engine.weights_id == tiny.weights_id


def test_a_pool_of_another_layer_list_is_refused(tiny: LoadedModel) -> None:
    # as many full layers, but not the same ones
    other = replace(tiny.shape, indexer_types=(FULL, FULL, FULL, SHARED, SHARED, SHARED, SHARED, FULL))
    with pytest.raises(ConfigError, match="segments"):
        ReferenceEngine(tiny, SlotPool.create(page_format(other), 4))


def test_rows_it_cannot_write_are_refused_by_name(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="nvfp4"):
        ReferenceEngine(tiny, SlotPool.create(page_format(tiny.shape, main_row="nvfp4"), 4))


def test_a_pooled_index_is_refused(tiny: LoadedModel) -> None:
    shape = replace(tiny.shape, index_kpool=2)
    with pytest.raises(ConfigError, match="index_kpool"):
        ReferenceEngine(replace(tiny, shape=shape), SlotPool.create(page_format(shape), 4))
