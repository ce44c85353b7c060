"""Lists of addresses as they are now: what stands in them, and what is found in the places that they name.

Guarantees: whoever is told of a list gets all of it, in the order of its words, and again after each change; a look-up
that fails, or finds nobody, changes nothing: nodes that are known stay known, since whether they serve is asked of them
and not of who found them; each failure is said once, until the place answers again; a place that hangs holds up no
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pdkv.discovery.words import Place, Slices, place_of
from pdkv.errors import ConfigError, DiscoveryFailed
from pdkv.node.flow import together

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between a look-up and the next one, whether it failed or not."""

CHANGES_TOLD = 16
"""In a line of the log."""


class Source(Protocol):
    """Knows where the nodes of one place are."""

    def lists(self) -> AsyncGenerator[tuple[str, ...], None]:
        """All addresses (host:port) as they are now, sorted, and again whenever they may have changed; ends when it is
        to be asked anew. Raises `DiscoveryFailed`. No wait in it is without a deadline."""
        ...


Tell: TypeAlias = Callable[[str, tuple[str, ...]], None]
"""Hears the name of a list, and the list."""
MakeSource: TypeAlias = Callable[[Place], Source]


@dataclass(slots=True)
class _Word:
    """In the list `of`: an address, or a place and what was found there last."""

    of: str
    word: str
    source: Source | None
    addresses: tuple[str, ...]
    failed: str = ""
    """Why it finds nothing now."""


class Finder:
    """Has `run`, for the process's life."""

    def __init__(
        self, lists: Mapping[str, Sequence[str]], tell: Tell, make: MakeSource, *, again_s: float = AGAIN_S
    ) -> None:
        """`lists`: by name, words as `place_of` reads them; `tell` hears of each at once, as far as it is fixed.

        Raises `ConfigError` for a word that stands twice in a list.
        """
        for name, words in lists.items():
            if len(set(words)) != len(words):
                raise ConfigError(f"{name} addresses", list(words), "each once")
        self._tell = tell
        self._again_s = again_s
        self._words = [_Word(name, word, *_start(word, make)) for name, words in lists.items() for word in words]
        for name in lists:
            self._say(name)

    def status(self) -> dict[str, str]:
        """List and place, to how many it found, and why it finds nothing now."""
        return {
            f"{each.of} {each.word}": f"{len(each.addresses)} found" + (f"; now {each.failed}" if each.failed else "")
            for each in self._words
            if each.source
        }

    def failing(self) -> dict[str, int]:
        """List, to in how many of its places nothing is found now, whatever was found there before."""
        lists = {each.of: 0 for each in self._words if each.source}
        return lists | Counter(each.of for each in self._words if each.failed)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with together() as group:
            for each in self._words:
                if each.source:
                    group.create_task(self._follow(each, each.source))

    async def _follow(self, each: _Word, source: Source) -> None:
        while True:
            try:
                async with aclosing(source.lists()) as lists:
                    async for addresses in lists:
                        self._heard(each, addresses)
            except DiscoveryFailed as error:
                self._unheard(each, error)
            await asyncio.sleep(self._again_s)

    def _heard(self, each: _Word, addresses: tuple[str, ...]) -> None:
        if not addresses:
            self._unheard(each, DiscoveryFailed(each.word, "finds nobody"))
            return
        if each.failed:
            log.info("%s: %s answers again", each.of, each.word)
        each.failed = ""
        if addresses != each.addresses:
            changes = sorted(f"+{address}" for address in set(addresses).difference(each.addresses))
            changes += sorted(f"-{address}" for address in set(each.addresses).difference(addresses))
            if len(changes) > CHANGES_TOLD:
                changes[CHANGES_TOLD:] = [f"and {len(changes) - CHANGES_TOLD} more"]
            log.info("%s: %s finds %d: %s", each.of, each.word, len(addresses), " ".join(changes))
            each.addresses = addresses
            self._say(each.of)

    def _unheard(self, each: _Word, error: DiscoveryFailed) -> None:
        if not each.failed:
            log.warning("%s: %s; the %d that are known stay", each.of, error, len(each.addresses))
        each.failed = str(error)

    def _say(self, name: str) -> None:
        known = (address for each in self._words if each.of == name for address in each.addresses)
        self._tell(name, tuple(dict.fromkeys(known)))


def _start(word: str, make: MakeSource) -> tuple[Source | None, tuple[str, ...]]:
    place = place_of(word)
    return (make(place), ()) if place else (None, (word,))


def source_by(dns_server: str = "") -> MakeSource:
    """What looks in a place; `dns_server` (IP:PORT) instead of those of this machine, unless it is empty.

    It raises `MissingDependency` for a place that needs a package which isn't there.
    """

    def make(place: Place) -> Source:
        if isinstance(place, Slices):
            from pdkv.discovery.by_api import ApiSource

            return ApiSource(place)
        from pdkv.discovery.by_dns import DnsSource

        return DnsSource(place, dns_server)

    return make


async def found_now(words: Sequence[str], make: MakeSource) -> tuple[str, ...]:
    """What a list is now, for whoever looks once. Raises `DiscoveryFailed`."""
    known: list[str] = []
    for word in words:
        source, addresses = _start(word, make)
        known += addresses
        if source:
            async with aclosing(source.lists()) as lists:
                known += await anext(lists)
    return tuple(dict.fromkeys(known))
