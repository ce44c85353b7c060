"""What programs that check against another project's own code count: what held, and what didn't.

Guarantees: every check is told as it is made, on stderr, and counted.
"""

from __future__ import annotations

import sys


class Checks:
    """What held and what didn't, in order."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def that(self, holds: object, words: str) -> None:
        self.passed += bool(holds)
        if not holds:
            self.failed.append(words)
        print(f"{'ok  ' if holds else 'FAIL'} {words}", file=sys.stderr, flush=True)
