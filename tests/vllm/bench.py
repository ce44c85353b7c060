"""What the cases of `make vllm-e2e` work with: prompts, and engines in pairs.

Guarantees: the same prompts for the same seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checks import Checks
from tests.vllm.engines import Answer, Engine, Engines, Plan, Tokens
from tests.vllm.models import VOCABULARY, make

ANSWER_TOKENS = 12
BLOCK = 64
LENGTHS = (1, 5, 63, 64, 65, 128, 129, 700, 1500)


@dataclass(frozen=True)
class Prompts:
    cold: list[Tokens]
    shared: list[Tokens]
    """All begin with the same 500 tokens."""
    crowd: list[Tokens]
    """Sent eight at a time."""

    @property
    def all(self) -> list[Tokens]:
        return self.cold + self.shared + self.crowd


def prompts(seed: int) -> Prompts:
    draw = random.Random(seed)

    def some(count: int) -> Tokens:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    prefix = some(500)
    shared = [prefix + some(count) for count in (10, 70, 140)]
    return Prompts([some(n) for n in LENGTHS], shared, [some(draw.choice((100, 400, 1000))) for _ in range(24)])


@dataclass
class Bench:
    """What every case works with."""

    engines: Engines
    folder: Path
    checks: Checks

    def model(self, name: str, config: dict[str, object], seed: int = 0) -> Path:
        directory = self.folder / f"{name}-{seed}"
        return directory if directory.exists() else make(directory, config, seed)

    def alone(self, model: Path, asked: Sequence[Tokens]) -> list[Tokens]:
        """What an engine without a connector answers; eight at a time."""
        (engine,) = self.engines.start(Plan("alone", model))
        answers = at_once(lambda tokens: engine.ask(tokens, ANSWER_TOKENS), asked)
        self.engines.stop(engine)
        self.checks.that(all(not a.error for a in answers), "an engine by itself answers everything")
        return [a.tokens for a in answers]

    def pair(self, model: Path, connector: str = "PdkvConnector", extra: dict[str, Any] | None = None) -> list[Engine]:
        roles = ("prefill", "kv_producer"), ("decode", "kv_consumer")
        return self.engines.start(*(Plan(name, model, connector, role, extra or {}) for name, role in roles))


def at_once(ask: Callable[[Tokens], Answer], asked: Sequence[Tokens]) -> list[Answer]:
    with ThreadPoolExecutor(8) as workers:
        return list(workers.map(ask, asked))


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> bool:
    ends_s = time.monotonic() + seconds
    while not what():
        if time.monotonic() > ends_s:
            return False
    return True


def idle(engine: Engine) -> bool:
    return engine.metrics().get("vllm:kv_cache_usage_perc") == 0.0


def pages(tokens: Tokens) -> int:
    return -(-len(tokens) // BLOCK)
