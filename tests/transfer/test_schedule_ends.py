"""How flows end beside others: with few waits, and at nobody's cost."""

from __future__ import annotations

from unittest.mock import patch

from pdkv.transfer import schedule as schedule_module
from tests.transfer.links import GBIT, Link, Pages, peer, took


def beside_long(shorts: int = 40) -> tuple[float, float]:
    """Pulls of 4 pages beside a long one, all small, over TCP: the longest of them, by what it takes alone; and what
    the link carried, by its rate."""
    alone_link, page_bytes = Link((2 * GBIT,), bunches=True), 450_000
    alone_link.add(alone := Pages(peer(page_bytes), 4))
    alone_link.run(alone)
    link, source = Link((2 * GBIT,), bunches=True), peer(page_bytes)
    long = Pages(source, 16_384)
    link.add(long)
    tasks = []
    for number in range(shorts):
        for _ in range(100 + number):
            link.look()
        tasks.append(short := Pages(source, 4))
        link.add(short)
        link.run(short)
    carried = long.served + sum(task.served for task in tasks)
    return max(took(*tasks)) / took(alone)[0], carried / (link.now * link.rates[0])


def test_the_pages_of_a_short_request_wait_once_where_reads_end_in_bunches() -> None:
    """Its pages aren't cut in two; then its rows wait."""
    slower, carried = beside_long()
    with patch.object(schedule_module, "REST_SHARES", 0):
        cut, carried_then = beside_long()
    assert slower <= 2.8
    assert cut >= slower + 0.3
    assert carried >= carried_then, "the link waits no longer for that"
