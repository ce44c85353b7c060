"""The commands that docs/deploy.md and docs/operations.md say to type, and who runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.deploy.cluster import ROOT

PAGES = ("deploy.md", "operations.md")
_FENCE = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>bash|yaml)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, and the note above it: `run by: COMMAND`, `tested by: PATH`, or `not run: why`."""

    page: str
    language: str
    text: str
    note: str

    @property
    def runner(self) -> str:
        how, _, what = self.note.partition(": ")
        return what if how == "run by" else ""


def blocks(page: str) -> Iterator[Block]:
    for found in _FENCE.finditer((ROOT / "docs" / page).read_text("utf-8")):
        yield Block(page, found["language"], found["text"], (found["note"] or "").strip())


def run_by(command: str) -> list[Block]:
    """In the order in which a reader meets them."""
    return [block for page in PAGES for block in blocks(page) if block.runner == command]
