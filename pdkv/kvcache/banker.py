"""Whether requests that have some of their pages can all get the rest: the banker's algorithm for one kind of thing.

Guarantees: `shortage` is 0 if and only if there is an order in which each can get its rest from what is available and
what those before it give back when they end (E. W. Dijkstra, "Cooperating sequential processes", EWD 123, 1965, section
6). Pure; costs n log n.

With one kind of thing the order is known: whoever lacks least goes first. For if any order serves everybody, swapping
two neighbours of which the latter lacks no more than the former gives another one: the latter's rest was there already
without what the former gives back, and the former finds no less than before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def shortage(available: int, rest: npt.ArrayLike, back: npt.ArrayLike, *, exempt_last: bool = False) -> int:
    """How many more would have to be available for such an order to exist; 0: it does.

    `rest` int64 [requests]: what each may still take; `back` int64 [requests]: what is certain to be available again
    when it ends. With `exempt_last`, whoever lacks most may take its rest whatever is available, once it is alone.
    """
    lacks, gives = np.asarray(rest, np.int64), np.asarray(back, np.int64)
    order = np.argsort(lacks, kind="stable")
    lacks, gives = lacks[order], gives[order]
    found = available + np.cumsum(gives) - gives
    short = lacks - found
    if exempt_last:
        short = short[:-1]
    return max(int(short.max(initial=0)), 0)
