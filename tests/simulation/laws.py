"""What must hold whatever happens, checked while it happens and at the end.

Guarantees: what is right comes from the model alone (`Truth`, `page_bytes`), never from a node; a law that is broken
names the node, the pages and the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from pdkv.errors import IntegrityError
from pdkv.ids import LocalPages, PeerName, RequestId
from pdkv.kvcache.manager import Reservation
from pdkv.node.messages import GenerateRequest, PagesSealed
from pdkv.node.prompt import answer_hashes, plan_prompt
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.simulation.model import Truth, contract, page_bytes, rows, written_bytes
from tests.simulation.nodes import Life
from tests.simulation.world import World


class Laws:
    """What is true of the requests of one run, and the checks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.answers: dict[RequestId, list[int]] = {}
        self._prompts: dict[RequestId, tuple[np.ndarray, np.ndarray]] = {}
        self._by_hash: dict[bytes, bytes] = {}
        self._announced: dict[tuple[str, int, int], tuple[str, bytes]] = {}
        self._reservations: dict[tuple[str, Any], Reservation] = {}
        self._misled: set[Any] = set()
        """Tasks of requests whose last account was changed on its way: admitting one is wrong."""

    def know(self, request: GenerateRequest) -> None:
        """Compute what the request must come to."""
        prompt = plan_prompt(request.tokens, request.namespace, contract())
        truth = Truth(request.tokens)
        answer = self.answers[request.request_id] = truth.answer(request.sampling)
        whole = np.concatenate((request.tokens, np.array(answer, np.uint32)))
        more = answer_hashes(prompt, np.array(answer, np.uint32), contract())
        made = rows(whole, 0, 0)
        pages = page_bytes(made)
        for hash, page in zip([*prompt.hashes, *more], pages, strict=False):
            self._by_hash.setdefault(hash, page.tobytes())
        pages = page_bytes(made[: len(request.tokens)])
        self._prompts[request.request_id] = pages, written_bytes(len(request.tokens))
        if prompt.tail_hash:
            self._by_hash[prompt.tail_hash] = pages[-1].tobytes()

    # --- while it happens -----------------------------------------------------------------------------------------

    def watch(self, life: Life) -> None:
        """A decode node's reservations, by the task of their request."""
        queue = life.node.queue

        def watched(made: Callable[..., Awaitable[Reservation]]) -> Callable[..., Awaitable[Reservation]]:
            async def made_and_kept(*words: Any, **more: Any) -> Reservation:
                reservation = await made(*words, **more)
                self._reservations[str(life.name), asyncio.current_task()] = reservation
                return reservation

            return made_and_kept

        queue.admit, queue.exchange = watched(queue.admit), watched(queue.exchange)

    def admitted(self, life: Life, request: RequestId) -> None:
        """The first token is about to leave the node: both caches hold the prompt, byte for byte."""
        reservation = self._reservations[str(life.name), asyncio.current_task()]
        due, written = self._prompts[request]
        have = life.bytes_of(reservation.sequence[: len(due)])
        wrong = np.flatnonzero(((have != due) & written).any(axis=1)).tolist()
        self.world.require(not wrong, f"{life.process.name}: {request} is admitted with wrong bytes in pages {wrong}")
        misled = asyncio.current_task() in self._misled
        self.world.require(not misled, f"{life.process.name}: {request} is admitted on a wrong account")

    def heard(self, *, wrong: bool) -> None:
        """A request's task has heard the end of a prefill."""
        (self._misled.add if wrong else self._misled.discard)(asyncio.current_task())

    def announced(self, node: str, life: PeerName, sealed: PagesSealed) -> None:
        """A page and a generation of a node name one content, in one of its lives."""
        columns = (sealed.page_ids.tolist(), sealed.generations.tolist(), sealed.hashes)
        name = str(life)
        for page, generation, hash in zip(*columns, strict=True):
            key = (node, page, generation)
            said = (name, hash)
            before = self._announced.setdefault(key, said)
            if before != said:
                self.world.fail(f"{key} is {hash.hex()[:8]} of {life}, but was {before}")

    def read(self, life: Life, order: ReadOrder, outcome: ReadOutcome) -> None:
        """A read that ended well, from pages that were still the announced ones, brought their bytes."""
        if outcome.status is not ReadStatus.DONE:
            return
        have = life.bytes_of(order.local)
        for i, (page, hash) in enumerate(zip(order.local, order.hashes, strict=True)):
            if outcome.stale[i] or page in life.corrupted:
                continue
            due = self._by_hash.get(hash)
            if due is not None and have[i].tobytes() != due:
                self.world.fail(f"{life.process.name}: page {page} has other bytes than its fresh row says")
        life.corrupted.difference_update(order.local)

    def writes(self, life: Life, pages: LocalPages) -> None:
        """A step of the engine writes to pages that one request has, none of them sealed or still to be written to by a
        read."""
        life.require_quiet(pages, "are written to by the engine")
        sealed = life.pool.table.sealed(pages)
        if np.count_nonzero(sealed):
            self.world.fail(f"{life.process.name}: the engine writes to sealed pages {list(pages.where(sealed))}")
        holders = {life.holder(page) for page in pages}
        if len(holders) != 1 or 0 in holders:
            words = f"the engine writes to pages {list(pages)} of holders {sorted(holders)}"
            self.world.fail(f"{life.process.name}: {words}")

    def conserved(self, life: Life) -> None:
        try:
            life.manager.check()
        except IntegrityError as error:
            self.world.require(False, f"{life.process.name}: {error}")

    # --- at the end -----------------------------------------------------------------------------------------------

    def cached(self, life: Life) -> None:
        """Every sealed page has the bytes of its hash."""
        table = life.pool.table
        every = LocalPages.kept(np.arange(1, table.num_pages, dtype=np.int32))
        sealed = every.where(table.sealed(every))
        have = life.bytes_of(sealed)
        for page, hash, bytes_ in zip(sealed, table.hashes(sealed), have, strict=True):
            due = self._by_hash.get(hash)
            if due is not None and bytes_.tobytes() != due:
                self.world.fail(f"{life.process.name}: cached page {page} has not the bytes of its hash")

    def idle(self, life: Life) -> None:
        """Nobody wants anything: every page is free or cached."""
        census = life.manager.census()
        held = {state: census[state] for state in ("reserved", "private", "quarantined") if census[state]}
        self.world.require(not held, f"{life.process.name}: {held} when nothing runs")
        self.world.require(not life.manager.leased, f"{life.process.name}: leases keep pages when none lives")
        self.world.require(not life.manager.tree.locked, f"{life.process.name}: the tree is locked when nothing runs")
