"""Builds of the product that are broken on purpose: each breaks one law, and the simulation must notice.

Guarantees: a mutation changes one thing, by name, and only while its context lasts; they are the negative controls of
the simulation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

import pdkv.node.pull
from pdkv.errors import PdkvError, PeerLost
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.verifier import _PROOF, Arrival, VerifiedPages, Verifier, WatchedArrival
from pdkv.node.attempts import Attempts
from pdkv.node.flow import Worker
from pdkv.node.intake import Intake
from pdkv.node.links import Links
from pdkv.node.pull_back import PullBack
from pdkv.transfer.agents import ReadingAgent, Run
from pdkv.transfer.core import TransferCore
from pdkv.transfer.lines import Line
from pdkv.transfer.orders import ReadStatus
from pdkv.transfer.rotation import Rotation
from pdkv.transfer.schedule import Mark
from pdkv.transfer.tasks import OrderTask, Task, Wanted

Mutation = Callable[[], Any]


def freed_on_release() -> Any:
    """Pages of a read that was given up are taken for free: as if releasing its handle were a fence."""
    return patch.object(Intake, "_hold_back", lambda self, pages, outcome, reason: None)


def freed_on_timer() -> Any:
    """Pages of a read that was given up come back after a second, as if it could write no more by then."""

    def hold_back(intake: Intake, pages: LocalPages, outcome: Any, reason: str) -> None:
        if outcome.status is ReadStatus.UNSETTLED:
            manager, reservation = intake.parts.manager, intake.reservation
            manager.quarantine(reservation, pages, reason)
            asyncio.get_running_loop().call_later(1.0, manager.release_quarantine, reservation, pages)

    return patch.object(Intake, "_hold_back", hold_back)


def reuse_without_bump() -> Any:
    """A page gets a new owner under the generation that it had."""

    def bump(table: PageTable, pages: LocalPages) -> None:
        table._state[pages.index] = 0

    return patch.object(PageTable, "bump", bump)


def sealed_page_rewritten() -> Any:
    """The prompt's tail gets the answer's tokens while its row still says what was sealed."""
    return patch.object(CacheManager, "reopen_private", lambda self, reservation, pages: None)


def rows_before_data() -> Any:
    """The page-table rows are read first, so they say nothing of what was read after them."""

    def due(task: OrderTask) -> bool:
        if task.failure:
            return False
        if task._rows is None:
            return task._landing.free >= task.pages
        return bool(task._row_parts or (task._parts and not task.outstanding))

    def next_(task: OrderTask, most_bytes: int) -> Wanted:
        if task._rows is not None and not task._row_parts:
            return right_next(task, most_bytes)
        parts, task._parts = task._parts, deque()
        wanted = right_next(task, most_bytes)
        task._parts = parts
        return wanted

    def conclude(task: OrderTask) -> None:
        if task.failure:
            task._rows_landed = 0
        if task.failure or not task._parts:
            right_conclude(task)

    right_next, right_conclude = OrderTask.next, OrderTask._conclude
    patched = _both(patch.object(OrderTask, "due", property(due)), patch.object(OrderTask, "next", next_))
    return _both(patched, patch.object(OrderTask, "_conclude", conclude))


def generations_from_zero() -> Any:
    """Each life of a node counts from zero."""
    right = PageTable.__init__

    def init(table: PageTable, num_pages: int, *, first_generation: int | None = None) -> None:
        right(table, num_pages, first_generation=0)

    return patch.object(PageTable, "__init__", init)


def row_buffer_reused() -> Any:
    """The landing rows of a read that was given up go to the next one."""
    right = OrderTask.give_up

    def give_up(task: OrderTask, reason: str) -> None:
        right(task, reason)
        if task._rows is not None:
            task._landing.give_back(task._rows)

    return patch.object(OrderTask, "give_up", give_up)


def commit_deferred() -> Any:
    """No breach by itself: commits come a little later, whether or not the request has ended; then they are refused."""

    async def pull(intake: Intake, sealed: Any, remote: Any, before: Any) -> None:
        first, stop = sealed.first_index, sealed.first_index + len(sealed.hashes)
        if intake.reach is not None:
            await intake.reach(stop)
        local, tail = intake.reservation.sequence[first:stop], first >= intake.prompt.recorded_pages
        if tail:
            intake.parts.manager.take_private(intake.reservation, local)
        verified = await intake._read_verified(sealed, local, remote)
        if before is not None:
            await before
        if tail:
            return intake.parts.manager.seal_private(intake.reservation, verified)
        loop = asyncio.get_running_loop()
        committed = loop.create_future()

        def commit() -> None:
            try:
                intake.parts.manager.commit(verified)
            except PdkvError as error:
                if not committed.done():
                    committed.set_exception(error)
            else:
                if not committed.done():
                    committed.set_result(None)

        loop.call_later(0.003, commit)
        await committed

    return patch.object(Intake, "_pull", pull)


def commit_unbound() -> Any:
    """What was verified is committed, whether or not the reservation that it was read for still lives."""
    right = CacheManager.commit

    def commit(manager: CacheManager, verified: VerifiedPages) -> LocalPages:
        if verified.reservation in manager.reservations:
            return right(manager, verified)
        manager.table.seal(verified.pages, verified.hashes)
        return verified.pages

    return _both(commit_deferred(), patch.object(CacheManager, "commit", commit))


def digest_skipped() -> Any:
    """Whatever arrived is taken for what was announced."""
    return patch.object(Verifier, "checks_digests", False)


def account_skipped() -> Any:
    """Prefill's account is not looked at."""
    return patch.object(pdkv.node.pull, "require_admissible", lambda *words, **more: None)


def index_apart() -> Any:
    """Pages are committed when main KV is proved; index-K would be looked at later."""
    right = Verifier.verify

    def verify(verifier: Verifier, arrival: Arrival) -> VerifiedPages:
        have = digest_pages(verifier.pool, arrival.pages, verifier.algorithm)
        if np.array_equal(have[:, 0], arrival.digests[:, 0]):
            return VerifiedPages(
                arrival.reservation, arrival.first_index, arrival.pages, arrival.hashes, have, proof=_PROOF
            )
        return right(verifier, arrival)

    return patch.object(Verifier, "verify", verify)


def step_abandoned() -> Any:
    """Whoever is cancelled doesn't wait for the step that runs for it."""

    async def run(worker: Worker, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(worker._pool.submit(step, *args, **kwargs))

    return patch.object(Worker, "run", run)


def pulled_in_place() -> Any:
    """What could not be pulled back is computed into the pages that it was to arrive in."""

    def kept(pull_back: PullBack, old: Reservation, prompt: Any, priority: int) -> Reservation:
        old.hit = old.sequence[: old.committed]
        return old

    return patch.object(PullBack, "_exchanged", kept)


def read_again_before_the_fence() -> Any:
    """What went astray on a rail that is down is posted on another one while its agent is still there."""

    def finish(rotation: Rotation) -> list[Run]:
        old = rotation._retired
        if old is None or not all(run.stranded or run.task.failure for run in old.running):
            return []
        rotation._retired, outstanding = None, [*old.running, *old.lost]
        for run in outstanding:
            run.task.outstanding -= 1
        for run in old.running:
            run.line.finished(run.wanted.bytes)
        rotation.rotations += 1
        return outstanding

    return patch.object(Rotation, "finish", finish)


def no_fence() -> Any:
    """Reads without an end hold their pages back for ever."""
    return patch.object(TransferCore, "_fence", lambda self, now: None)


def pages_leaked() -> Any:
    """A request that fails before its answer keeps what it reserved."""
    return patch.object(Attempts, "close", lambda self: None)


def blacklisted() -> Any:
    """A prefill node that failed once is never asked again."""
    right = Links.of

    def forget(links: Links, link: Any, why: PdkvError | None = None) -> None:
        links.__dict__.setdefault("failed", set()).add(link.address)

    async def of(links: Links, address: str) -> Any:
        if address in links.__dict__.get("failed", ()):
            raise PeerLost(f"{address} failed once")
        return await right(links, address)

    return _both(patch.object(Links, "forget", forget), patch.object(Links, "of", of))


def seen_under_way() -> Any:
    """The pages of a read are shown to its witness once they are posted, whether or not they have landed."""
    right = ReadingAgent.post

    def post(agent: ReadingAgent, task: Task, line: Line, wanted: Wanted, mark: Mark) -> None:
        right(agent, task, line, wanted, mark)
        if wanted.witness is not None and line.lane.copied and agent.running[-1].posted:
            wanted.witness.landed(wanted.part)

    return patch.object(ReadingAgent, "post", post)


def seen_once() -> Any:
    """What was right in a page when it was seen counts as right when the same is read into it anew."""
    right = WatchedArrival._look

    def look(arrival: WatchedArrival, part: slice, written: UInt32Array) -> None:
        right(arrival, part, written)
        known = arrival.verifier.__dict__.setdefault("known", {})
        for i, page in enumerate(arrival.pages.array[part].tolist(), part.start):
            if known.get(page) == arrival.digests[i].tolist():
                arrival.taken[i] = known[page]
            known[page] = arrival.taken[i].tolist()

    return patch.object(WatchedArrival, "_look", look)


def seen_in_reverse() -> Any:
    """Digests of what landed are put down from the last page of an order to its first."""

    def look(arrival: WatchedArrival, part: slice, written: UInt32Array) -> None:
        pages = arrival.pages.array[part].tolist()
        there = slice(len(arrival.pages) - part.stop, len(arrival.pages) - part.start)
        for column, digests in enumerate(arrival.rows.digests(pages[::-1])):
            arrival.taken[there, column] = digests
        arrival.seen[there] = written[::-1]

    return patch.object(WatchedArrival, "_look", look)


MUTATIONS: dict[str, Mutation] = {
    "freed-on-release": freed_on_release,
    "freed-on-timer": freed_on_timer,
    "reuse-without-bump": reuse_without_bump,
    "sealed-page-rewritten": sealed_page_rewritten,
    "rows-before-data": rows_before_data,
    "generations-from-zero": generations_from_zero,
    "row-buffer-reused": row_buffer_reused,
    "commit-unbound": commit_unbound,
    "digest-skipped": digest_skipped,
    "account-skipped": account_skipped,
    "index-apart": index_apart,
    "step-abandoned": step_abandoned,
    "pulled-in-place": pulled_in_place,
    "read-again-before-the-fence": read_again_before_the_fence,
    "no-fence": no_fence,
    "pages-leaked": pages_leaked,
    "blacklisted": blacklisted,
    "seen-under-way": seen_under_way,
    "seen-once": seen_once,
    "seen-in-reverse": seen_in_reverse,
}
HARMLESS: dict[str, Mutation] = {"commit-deferred": commit_deferred}
"""What a mutation needs beside its breach: alone, nothing may come of it."""


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield
