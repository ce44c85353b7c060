"""What stood in a page before is another tenant's: no row of it leaves a node, in either cache or a draft layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Accepted, PagesSealed, PrefillDone
from tests.node.scene import prefill_request, recovered, request, run, said
from tests.node.test_speculation import MTP
from tests.node.toy import PAGE, Pair, make_pair, rows_of

FACTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer-major": {"placement": "layer_major"},
    "drop a page": {"eagle_rule": "drop_page", "speculation": "eagle"},
    "draft layer": MTP,
}


def dirty(pool: SlotPool) -> None:
    """Every byte is somebody's; no row is like one that the toy engine writes, of one byte's value."""
    for number, buffer in enumerate(pool.memory.buffers):
        buffer.numpy()[:] = np.random.default_rng(number).integers(1, 255, len(buffer), np.uint8)


def left_behind(pool: SlotPool, page: int, tokens: int) -> list[str]:
    """Segments of the page with a byte that isn't zero behind its first `tokens` slots."""
    return [s.name for s in pool.fmt.segments if any(rows[page, tokens:].any() for rows in rows_of(pool, s))]


async def sent(pair: Pair, length: int) -> tuple[list[int], int]:
    """Pages that a peer may read of a prompt, in its order, and how many tokens the last one has."""
    await pair.decode.connect("p0")
    asked = request(length)
    accepted, *sealed, done = await said(pair.prefill.prefill(prefill_request(pair, asked)))
    assert isinstance(accepted, Accepted)
    assert isinstance(done, PrefillDone)
    columns = [c for c in (*sealed, done.tail) if isinstance(c, PagesSealed)]
    pages = np.concatenate([c.page_ids for c in columns]).tolist()
    return pages, done.account.prompt_tokens - PAGE * (done.account.pages - 1)


async def nothing_is_left(pair: Pair, length: int) -> None:
    dirty(pair.prefill.parts.pool)
    dirty(pair.decode.parts.pool)
    pages, tokens = await sent(pair, length)
    pool = pair.prefill.parts.pool
    assert left_behind(pool, pages[-1], tokens) == []
    for segment in pool.fmt.segments:
        drafted = segment.name.startswith("draft_")  # such a row needs the token after its own
        for rows in rows_of(pool, segment):
            for page in pages:
                sent_rows = rows[page, : (tokens - drafted if page == pages[-1] else PAGE)]
                assert (sent_rows == sent_rows[:, :1]).all(), (segment.name, page)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 300])
@pytest.mark.parametrize("facts", FACTS)
def test_no_row_of_another_request_leaves_a_node(facts: str, length: int) -> None:
    async def scenario(pair: Pair) -> None:
        await nothing_is_left(pair, length)

    run(scenario, make_pair(both=FACTS[facts]), tidy=False)


def test_a_tail_that_is_not_zeroed_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: main rows, index keys and scales each."""
    monkeypatch.setattr(SlotPool, "zero_tail", lambda *_: None)

    async def scenario(pair: Pair) -> None:
        with pytest.raises(AssertionError):
            await nothing_is_left(pair, 65)
        found = left_behind(pair.prefill.parts.pool, (await sent(pair, 70))[0][-1], 6)
        assert found == [segment.name for segment in pair.prefill.parts.pool.fmt.segments]

    run(scenario, make_pair(), tidy=False)


def test_what_decode_has_of_it_is_zero_too() -> None:
    """The whole page travels: bytes that decode's memory held before are gone as well."""

    async def scenario(pair: Pair) -> None:
        dirty(pair.decode.parts.pool)
        seen: list[list[str]] = []
        pool = pair.decode.parts.pool
        verify = pair.decode.parts.verifier.verify

        def looking(arrival: Any) -> Any:
            if arrival.first_index == 2:
                seen.append(left_behind(pool, int(arrival.pages.array[-1]), 130 - 2 * PAGE))
            return verify(arrival)

        pair.decode.parts.verifier.verify = looking  # type: ignore[method-assign]
        events = pair.decode.generate(request(130))
        await anext(events)
        await events.aclose()
        assert seen == [[]]
        await recovered(pair)

    run(scenario, make_pair())
