"""Messages that arrive as something else than what was sent.

Guarantees: a change is used up by the next message that it fits; what was made of a message is noted; without one, and
when the faults are over, every message arrives as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pdkv.ids import PageHashes
from pdkv.node.messages import Accepted, Loan, NodeIntro, PagesSealed, PrefillDone, PrefillRequest
from tests.simulation.nodes import Life
from tests.simulation.world import World

Change = Callable[[Any], Any]
"""What becomes of a message; None for one that it doesn't fit."""


class Garbage:
    """Changes that wait for their messages, by sender."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wrong_accounts: list[PrefillDone] = []
        """As they arrived."""
        self._waiting: dict[str, list[Change]] = {}

    def next_from(self, sender: Life, change: Change) -> None:
        """Of the node in this life or a later one."""
        self._waiting.setdefault(sender.process.name, []).append(change)

    def clear(self) -> None:
        self._waiting.clear()

    def changed(self, sender: str, message: Any) -> Any:
        """A message on its way."""
        for change in self._waiting.get(sender, ()):
            if (garbled := change(message)) is not None:
                self._waiting[sender].remove(change)
                self.world.note("garbled", sender, type(message).__name__)
                return garbled
        return message

    def pages(self, message: Any) -> Any:
        if isinstance(message, PrefillRequest) and message.offered is not None:
            return replace(message, offered=self.pages(message.offered))
        if isinstance(message, Loan):
            return replace(message, pages=self.pages(message.pages))
        if isinstance(message, Accepted) and message.cached is not None:
            return replace(message, cached=self.pages(message.cached))
        if not isinstance(message, PagesSealed):
            return None
        ids, generations, digests = message.page_ids, message.generations, message.digests
        match self.world.random.randrange(6):
            case 0:
                return replace(message, page_ids=ids + np.int32(1 << 20))
            case 1:
                return replace(message, page_ids=np.zeros_like(ids))
            case 2:
                return replace(message, generations=generations + np.uint64(1))
            case 3:
                return replace(message, digests=digests ^ np.uint64(4))
            case 4:
                return replace(message, first_index=message.first_index + 1)
            case _:
                return replace(message, hashes=PageHashes(bytes(len(message.hashes.raw))))

    def account(self, message: Any) -> Any:
        if not isinstance(message, PrefillDone):
            return None
        account = message.account
        changed = self.world.random.choice(
            (
                replace(account, prompt_tokens=account.prompt_tokens + 1),
                replace(account, resume_tokens=account.resume_tokens + 8),
                replace(account, last_page_hash=bytes(32)),
                replace(account, indexer_types=("full", "full")),
            )
        )
        self.wrong_accounts.append(replace(message, account=changed))
        return self.wrong_accounts[-1]

    def intro(self, message: Any) -> Any:
        if not isinstance(message, NodeIntro):
            return None
        match self.world.random.randrange(3):
            case 0:
                return replace(message, agent_metadata=message.agent_metadata[:-7])
            case 1:
                return replace(message, metadata_checksum=message.metadata_checksum ^ 1)
            case _:
                moved = tuple(replace(s, base=s.base + (1 << 40)) for s in message.pool.segments)
                regions = tuple(replace(r, address=r.address + (1 << 40)) for r in message.pool.regions)
                return replace(message, pool=replace(message.pool, segments=moved, regions=regions))
