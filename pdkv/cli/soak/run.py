"""Runs a soak: clients that ask for ever, nodes that die under them, and a reckoning at the end.

Guarantees: an answer counts as right only if its tokens and the digests of all its logits are one process's; a request
ends in exactly one way of the report's; pages are reckoned when nothing runs and nobody is stopped any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.demo.reference import Reference
from pdkv.cli.soak.keeper import Keeper, Post
from pdkv.cli.soak.report import SoakReport
from pdkv.cli.soak.traffic import CHUNK_TOKENS, SoakAsk, Traffic
from pdkv.config import PrefillConfig
from pdkv.errors import PdkvError
from pdkv.node.flow import deadline, together
from pdkv.node.messages import GenerateDone, NodeStatus, Token
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText

OVERDUE_S = 10.0
"""Past its own deadline a request counts as hung."""
REST_DEADLINE_S = 90.0
LOOK_EVERY_S = 0.25
AGAIN_S = 0.1
"""After which a client that failed tries again."""


@dataclass(frozen=True, slots=True)
class SoakSettings:
    seconds: float
    seed: int
    clients: int
    pool_pages: int
    kill_every_s: float


class Soak:
    """One run; fills `report`."""

    def __init__(self, settings: SoakSettings, report: SoakReport, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        report.asked_s = settings.seconds
        report.gap_s = settings.kill_every_s
        self._say = say
        self._traffic = Traffic(settings.seed)
        self._fleet = Nursery()
        self._nodes = GrpcDirectory(PlainText())
        self._reference = Reference(PrefillConfig(model="tiny", chunk_tokens=CHUNK_TOKENS, threads=1))
        self._right: dict[int, MonolithAnswer] = {}
        self._keeper = Keeper(self._fleet, report, settings.seed, pool_pages=settings.pool_pages, say=self._tell)
        self._keeper.lost = self._prefill_lost
        self._keeper.disturbed = self._disturbed
        self._lost_at: float | None = None
        self._lost = asyncio.Event()
        """A prefill node has died, the others being well: somebody has to ask at once, to see how long it shows."""
        self._began = time.monotonic()

    async def run(self) -> None:
        try:
            async with self._fleet:
                await self._run()
        finally:
            await self._nodes.close()
            self._reference.close()

    async def _run(self) -> None:
        keeper, settings = self._keeper, self._settings
        self._say("computing every answer in one process, and starting the fleet")
        async with together() as group:
            keeping = [group.create_task(keeper.keep(post)) for post in (*keeper.nodes, keeper.router)]
            for number, prompt in enumerate(self._traffic.prompts):
                self._right[number] = await self._reference.ask(prompt.tokens, prompt.sampling)
            await self._all_serving()
            self._began = time.monotonic()
            harassing = group.create_task(keeper.harass(settings.kill_every_s))
            async with together() as clients:
                for _ in range(settings.clients):
                    clients.create_task(self._client())
                clients.create_task(self._prober())
            harassing.cancel()
            keeper.make_peace()
            await self._all_serving()
            await self._reckon()
            for task in keeping:
                task.cancel()
        await keeper.end()
        self._report.elapsed_s = time.monotonic() - self._began

    async def _client(self) -> None:
        """One request after the other; the pace after a failure is that of a client that tries again."""
        while time.monotonic() - self._began < self._settings.seconds:
            if not await self._ask(self._traffic.next()):
                await asyncio.sleep(AGAIN_S)

    async def _prober(self) -> None:
        """A short request as soon as a prefill node has died: the other clients' would tell how long they take
        themselves."""
        ends_s = asyncio.get_running_loop().time() + self._settings.seconds
        async with together() as probes:
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout_at(ends_s):
                        await self._lost.wait()
                    self._lost.clear()
                    probes.create_task(self._probe(ends_s))  # whatever became of the request of an earlier death

    async def _probe(self, ends_s: float) -> None:
        """Asks until a good answer came or all is different. It waits for a router while there is none, and at a
        client's pace while that one can't have it served."""
        lost_at = self._lost_at
        with suppress(TimeoutError):
            while lost_at is not None and self._lost_at == lost_at and asyncio.get_running_loop().time() < ends_s:
                async with asyncio.timeout_at(ends_s):
                    await self._keeper.router.serving.wait()
                if not await self._ask(self._traffic.probe()):
                    async with asyncio.timeout_at(ends_s):
                        await asyncio.sleep(AGAIN_S)
        if self._lost_at == lost_at:
            self._disturbed()  # by the end

    async def _ask(self, ask: SoakAsk) -> bool:
        """False if it ended with a named error."""
        report, began = self._report, time.monotonic()
        report.requests += 1
        said: list[Token] = []
        done: GenerateDone | None = None
        failed = False
        try:
            async with (
                asyncio.timeout(ask.request.remaining_s + OVERDUE_S),
                aclosing(self._nodes.router(self._keeper.router.address).generate(ask.request)) as events,
            ):
                async for event in events:
                    if isinstance(event, GenerateDone):
                        done = event
                        continue
                    said.append(event)
                    if ask.abort_after is not None and len(said) > ask.abort_after:
                        report.aborted += 1
                        return True
        except PdkvError as error:
            report.failures[error.kind] += 1
            self._compare(ask, said, whole=False)
            failed = True
        except TimeoutError:
            report.hung += 1
            report.notes.append(f"{ask.request.request_id} hung after {len(said)} tokens")
        else:
            if done is None:
                report.failed_unnamed += 1
                report.notes.append(f"{ask.request.request_id}: the stream ended without a last word")
            elif self._compare(ask, said, whole=True):
                report.finished += 1
                self._recovered(began)
        self._tell("")
        return not failed

    def _compare(self, ask: SoakAsk, said: list[Token], *, whole: bool) -> bool:
        """What was said of an answer that broke off must be right as well."""
        right = self._right[ask.prompt]
        end = None if whole else len(said)
        same = tuple(token.token for token in said) == right.tokens[:end]
        same &= tuple(token.logits_digest for token in said) == right.logits_digests[:end]
        if not same:
            self._report.wrong_answers += 1
            differ = [i for i, t in enumerate(said) if i >= len(right.tokens) or t.token != right.tokens[i]]
            self._report.notes.append(
                f"{ask.request.request_id}, prompt {ask.prompt}, {ask.request.on_failure}: tokens that differ: {differ}"
                f" of {len(said)}, due {len(right.tokens)}"
            )
        return same

    def _prefill_lost(self) -> None:
        """After the end nobody asks any more."""
        if time.monotonic() - self._began < self._settings.seconds:
            self._lost_at = time.monotonic()
            self._lost.set()

    def _disturbed(self) -> None:
        """Something else happened before a good answer came: that is another matter."""
        if self._lost_at is not None:
            self._report.cut_off(time.monotonic() - self._lost_at)
            self._lost_at = None

    def _recovered(self, began: float) -> None:
        if self._lost_at is not None and began >= self._lost_at:
            self._report.recoveries_s.append(time.monotonic() - self._lost_at)
            self._lost_at = None

    async def _all_serving(self) -> None:
        for post in (*self._keeper.nodes, self._keeper.router):
            await post.serving.wait()

    async def _reckon(self) -> None:
        """Every page free or cached on every node, in good time."""
        self._say("waiting until nobody holds a page")
        held: dict[str, int] = {}
        with suppress(PdkvError):
            async with deadline(REST_DEADLINE_S, "the fleet coming to rest"):
                while held := {
                    post.name: n for post in self._keeper.nodes if (n := held_pages(await self._status(post)))
                }:
                    await asyncio.sleep(LOOK_EVERY_S)
        self._report.leaked_pages = sum(held.values())
        self._report.notes += [f"{name} still holds {n} pages" for name, n in held.items()]

    async def _status(self, post: Post) -> NodeStatus:
        client = self._nodes.peer(post.address) if post.role == "prefill" else self._nodes.decode(post.address)
        return await client.status()

    def _tell(self, text: str) -> None:
        self._report.elapsed_s = time.monotonic() - self._began
        self._say(text)


def held_pages(status: NodeStatus) -> int:
    """Pages that somebody has, and that are lost if nobody should: neither free nor cached."""
    pages = status.pages
    return pages["total"] - pages["free"] - pages["cached"]
