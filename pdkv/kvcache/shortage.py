"""Why there is no room for a request, in every unit that an operator counts in.

Guarantees: a refusal says which number is short (tokens, pages, bytes of both caches) and whether the request can ever
fit in this pool; pure.
"""

from __future__ import annotations

from pdkv.errors import CapacityError, NeverFits
from pdkv.geometry.page_layout import PageFormat


def never_fits(fmt: PageFormat, pages: int, usable: int) -> NeverFits:
    """A request of `pages` in all, in a pool that has `usable`."""
    return NeverFits(
        f"{_amount(fmt, pages)}, the whole pool has {usable} pages: {_short(fmt, pages - usable)}, whatever ends",
        total=usable,
        free_pages=usable,
        evictable_pages=0,
        ever_fits=False,
        **_facts(fmt, pages, pages - usable),
    )


def no_room(fmt: PageFormat, pages: int, evictable: int, census: dict[str, int]) -> CapacityError:
    """`pages` that the cache doesn't have, with so many free now (`census`) and so many cached ones evictable."""
    short = pages - census["free"] - evictable
    return CapacityError(
        f"{_amount(fmt, pages)}, {census['free']} free and {evictable} evictable: {_short(fmt, short)} for now",
        evictable=evictable,
        free_pages=census["free"],
        evictable_pages=evictable,
        ever_fits=True,
        **_facts(fmt, pages, short),
        **census,
        locked=census["cached"] - evictable,
    )


def not_safe(fmt: PageFormat, pages: int, short: int, evictable: int, census: dict[str, int]) -> CapacityError:
    """`pages` that are there, but with which somebody who has started could wait for its others in vain, unless `short`
    more were."""
    return CapacityError(
        f"{_amount(fmt, pages)}: with them, requests that have started could wait for each other's pages for ever;"
        f" {_short(fmt, short)} for now",
        evictable=evictable,
        free_pages=census["free"],
        evictable_pages=evictable,
        ever_fits=True,
        **_facts(fmt, pages, short),
        **census,
        locked=census["cached"] - evictable,
    )


def _facts(fmt: PageFormat, pages: int, short: int) -> dict[str, int]:
    """In tokens: slots of the pages, so a request's own tokens rounded up."""
    return {
        "wanted": pages,
        "wanted_tokens": pages * fmt.page_tokens,
        "wanted_pages": pages,
        "wanted_main_bytes": pages * fmt.main_bytes,
        "wanted_index_bytes": pages * fmt.index_bytes,
        "short_pages": short,
        "short_bytes": short * fmt.page_bytes,
    }


def _amount(fmt: PageFormat, pages: int) -> str:
    main, index = pages * fmt.main_bytes, pages * fmt.index_bytes
    return f"{pages} pages wanted ({pages * fmt.page_tokens} tokens, {main} B of main and {index} B of index)"


def _short(fmt: PageFormat, pages: int) -> str:
    return f"{pages} pages ({pages * fmt.page_bytes} B) short"
