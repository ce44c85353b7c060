"""A pool in a GPU's memory does what one in host memory does: bytes, digests, moves, copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdkv.adapters.synthetic.engine import SyntheticEngine, synthetic_model
from pdkv.cli.doctor import gpu as doctor
from pdkv.errors import DigestMismatch
from pdkv.geometry.page_layout import Group, PageFormat, PlacementKind, page_format
from pdkv.ids import LocalPages, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.device_digest import scramble, scrambler
from pdkv.kvcache.gpudirect import Flush, flush, flush_of
from pdkv.kvcache.offload import HostStore
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.page_hash import chain
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.machine.devices import devices
from pdkv.node.faults import FAULTS
from tests.kvcache.pools import PLACEMENTS, all_pages, page_segments, pages_of, random_pool, tiny_format

pytestmark = pytest.mark.gpu
PAGES = 6
FORMATS = [tiny_format(draft_layers=1), tiny_format(kpool=2, rollback=2)]
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["draft", "pooled"])


def twins(fmt: PageFormat, placement: PlacementKind, device: str) -> tuple[SlotPool, SlotPool]:
    """A pool in host memory, and one on the device with the same bytes."""
    host = random_pool(fmt, PAGES, placement=placement)
    there = SlotPool.create(fmt, PAGES, placement=placement, memory="torch", device=device)
    for mine, theirs in zip(host.memory.buffers, there.memory.buffers, strict=True):
        theirs.copy_(mine)
    there.memory.settle()
    return host, there


def same(host: SlotPool, there: SlotPool) -> bool:
    """Pages only: the write sink is anybody's."""
    return all(
        np.array_equal(mine, theirs)
        for page in range(1, PAGES)
        for mine, theirs in zip(page_segments(host, page), page_segments(there, page), strict=True)
    )


@each_placement
@each_format
def test_what_changes_pages_changes_the_same_bytes(fmt: PageFormat, placement: PlacementKind, device: str) -> None:
    host, there = twins(fmt, placement, device)
    assert there.map().memory == ("DRAM" if device == "cpu" else "VRAM")
    for pool in (host, there):
        pool.zero(pages_of(pool, 2))
        pool.zero_tail(3, fmt.page_tokens - 5)
        pool.copy_page(1, 4)
        pool.copy_pages(pages_of(pool, 3), pages_of(pool, 5))
    assert same(host, there)


@each_placement
@each_format
def test_digests_are_those_of_host_memory(fmt: PageFormat, placement: PlacementKind, device: str) -> None:
    host, there = twins(fmt, placement, device)
    assert np.array_equal(digest_pages(there, all_pages(there)), digest_pages(host, all_pages(host)))


def test_pages_of_a_real_model(device: str) -> None:
    """3.45 MB a page, and more pages than are digested in one piece."""
    fmt = page_format(synthetic_model("glm-5.3").shape)
    there = SlotPool.create(fmt, 32, memory="torch", device=device)
    for buffer in there.memory.buffers:
        buffer.random_(0, 256)
    host = SlotPool.create(fmt, 32)
    host.memory.buffers[0].copy_(there.memory.buffers[0])
    assert np.array_equal(digest_pages(there, all_pages(there)), digest_pages(host, all_pages(host)))


@each_placement
def test_a_damaged_page_is_named(placement: PlacementKind, device: str) -> None:
    host, there = twins(FORMATS[0], placement, device)
    pages, hashes = pages_of(host, 1, 2, 3), chain(range(64 * 3))
    sealed = Verifier(host).seal(ReservationId(1), 0, pages, hashes)
    arrival = Arrival(ReservationId(1), 0, pages, hashes, sealed.digests.copy())
    Verifier(there).verify(arrival)
    for name, damage in FAULTS.items():
        _, damaged = twins(FORMATS[0], placement, device)
        damage(damaged, pages)
        with pytest.raises(DigestMismatch) as caught:
            Verifier(damaged).verify(arrival)
        assert caught.value.bad, name


@each_placement
def test_pages_go_to_host_memory_and_come_back(placement: PlacementKind, device: str) -> None:
    host, there = twins(FORMATS[0], placement, device)
    store, tokens = HostStore(there, 1 << 30), 64 + 7
    copy = store.save(pages_of(there, 1, 2), tokens)
    there.zero(pages_of(there, 4, 5))
    store.load(copy, 0, pages_of(there, 4, 5))
    host.zero_tail(2, 7)
    assert np.array_equal(digest_pages(there, pages_of(there, 4, 5)), digest_pages(host, pages_of(host, 1, 2)))


def test_a_synthetic_engine_writes_the_same_rows(device: str) -> None:
    model = synthetic_model("tiny")
    fmt = page_format(model.shape)
    host, there = SlotPool.create(fmt, 4), SlotPool.create(fmt, 4, memory="torch", device=device)
    tokens, pages = np.arange(100, dtype=np.uint32), LocalPages.checked(np.array([3, 1], np.int32), 4)
    there.zero(all_pages(there))
    logits = [SyntheticEngine(model, pool).forward(tokens, 0, pages) for pool in (host, there)]
    assert np.array_equal(*logits)
    for group in Group:
        for mine, theirs in zip(host.group_bytes(3, group), there.group_bytes(3, group), strict=True):
            assert np.array_equal(mine, theirs)


def test_the_sequential_part_is_one_kernel(device: str) -> None:
    assert scrambler(torch.device(device)) is not scramble


def test_cuda_says_how_a_nics_writes_are_ordered(device: str) -> None:
    kind = flush_of(torch.device(device))
    assert kind in (Flush.ORDERED, Flush.CALLED)
    flush(torch.device(device))


def test_the_doctor_finds_the_card(device: str) -> None:
    card = doctor.look(device)
    assert not isinstance(card, str), card
    assert card.free_bytes > 0
    assert card.address in {found.address for found in devices().gpus}
