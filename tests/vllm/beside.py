"""PdkvConnector beside vLLM's own NixlConnector: the same prompts, and the same accidents.

Guarantees: both get the same models, arguments, prompts and accidents; what has to hold is checked of PdkvConnector.
What doesn't hold of NixlConnector is told, and fails nothing: its agents poll in threads of their own, and on two cores
that can leave no time for the engines. So it gets `THEIRS_S`, and fewer prompts if that is over.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from tests.checks import Checks
from tests.vllm.bench import ANSWER_TOKENS, Bench, wait_for
from tests.vllm.engines import FOR_ANOTHER, Answer, Engine, Plan, Tokens, through
from tests.vllm.models import LLAMA, VOCABULARY

SIZES = (100, 500, 1500)
"""Tokens of a prompt."""
ROUNDS = 15
THEIRS_S = 150.0
"""For the figures of NixlConnector."""
STOPPED_S = 30.0
"""A prefill engine stands still for so long, or until whoever waits for it has given up; then it is killed."""


@dataclass
class Figures:
    """Of prompts of one size, in seconds."""

    first_token: list[float]
    """From the prompt's sending to the prefill engine until decode's first token is there."""
    decode: list[float]
    """Decode's part of it."""
    alone: list[float]
    """The same size, computed by the decode engine itself; in turns with the others."""

    def told(self) -> dict[str, float]:
        return {
            "prompts": len(self.alone),
            "first_token_p50_ms": _ms(statistics.median(self.first_token)),
            "first_token_p90_ms": _ms(statistics.quantiles(self.first_token, n=10)[-1]),
            "decode_p50_ms": _ms(statistics.median(self.decode)),
            "alone_p50_ms": _ms(statistics.median(self.alone)),
            "p50_over_alone": round(statistics.median(self.first_token) / statistics.median(self.alone), 2),
        }


def beside(bench: Bench) -> dict[str, Any]:
    """One pair after the other."""
    ours, theirs = _pair(bench, "PdkvConnector"), Checks()
    found = _pair(replace(bench, checks=theirs), "NixlConnector")
    return {"PdkvConnector": ours, "NixlConnector": found | {"did_not_hold": theirs.failed}}


def _pair(bench: Bench, connector: str) -> dict[str, Any]:
    served = bench.folder / f"served-{connector}"
    served.symlink_to(bench.model("llama", LLAMA).resolve())
    prefill = Plan(f"prefill-{connector}", served, connector, "kv_producer", extension="tests.vllm.damage.Damage")
    decode = Plan(f"decode-{connector}", served, connector, "kv_consumer")
    p, d = bench.engines.start(prefill, decode)
    draw, ours = random.Random(13), connector == "PdkvConnector"

    def some(size: int) -> Tokens:
        return [draw.randrange(3, VOCABULARY) for _ in range(size)]

    first = through(p, d, some(SIZES[0]), 1)
    bench.checks.that(first.tokens, f"beside: {connector} works {first.error}")
    found: dict[str, Any] = {"first_of_all_ms": _ms(first.seconds)}
    if not ours and first.error:
        bench.engines.stop(p, d)
        return found
    until_s = math.inf if ours else time.monotonic() + THEIRS_S
    for size in SIZES:
        found[f"{size}_tokens"] = _figures(bench, (p, d), [some(size) for _ in range(2 * ROUNDS)], until_s)
    found |= _moved(bench, d, ours=ours)

    asked = some(500)
    due, answer = p.ask(asked, ANSWER_TOKENS).tokens, _damaged(bench, (p, d), asked, ours=ours)
    found["damaged_source"] = _how(answer, due)
    if ours:
        bench.checks.that(answer.error.startswith("HTTP 5"), f"beside: a block that was damaged: {answer.error}")
        bench.checks.that(wait_for(lambda: d.counted().get("proofs_failed")), "beside: and it is counted")
        spoilt = p.ask(asked, ANSWER_TOKENS).tokens
        bench.checks.that(spoilt and spoilt != due, "beside: the damage is one that changes tokens")

    others, asked = some(500), some(500)
    due = p.ask(asked, ANSWER_TOKENS).tokens
    found |= _killed(bench, (p, d), [some(1500), some(1500)], ours=ours)
    found["then_others"] = _how(d.ask(others, 1), None)

    bench.engines.stop(p)
    if d.process.poll() is not None:
        bench.engines.stop(d)
        (d,) = bench.engines.start(decode)
    served.unlink()
    served.symlink_to(bench.model("llama", LLAMA, seed=1).resolve())
    (p,) = bench.engines.start(replace(prefill, name=f"others-{connector}"))
    answer = through(p, d, asked, ANSWER_TOKENS)
    found["other_weights"] = _how(answer, due)
    if ours:
        bench.checks.that(answer.error.startswith("HTTP 5"), f"beside: other weights of one name: {answer.error}")
        bench.checks.that("weights_id: mine" in d.log.read_text(), "beside: they are refused by weights_id")
    bench.engines.stop(p, d)
    return found


def _figures(bench: Bench, pair: tuple[Engine, Engine], asked: list[Tokens], until_s: float) -> dict[str, float]:
    (p, d), figures, failed = pair, Figures([], [], []), list[str]()
    for shipped, computed in zip(asked[::2], asked[1::2], strict=True):
        began_s = time.monotonic()
        answer = through(p, d, shipped, 1)
        figures.first_token.append(time.monotonic() - began_s)
        figures.decode.append(answer.seconds)
        alone = d.ask(computed, 1)
        figures.alone.append(alone.seconds)
        failed += [each.error for each in (answer, alone) if each.error]
        if len(figures.alone) >= 2 and time.monotonic() > until_s:
            break
    bench.checks.that(not failed, f"beside: prompts of {len(asked[0])} tokens are answered {failed or ''}")
    return figures.told()


def _moved(bench: Bench, decode: Engine, *, ours: bool) -> dict[str, float]:
    """What both connectors count of what they read, once they have counted all of it."""
    prefix = "vllm:pdkv_" if ours else "vllm:nixl_"
    names = {
        "loads": "loads_total" if ours else "xfer_time_seconds_count",
        "bytes": "bytes_loaded_total" if ours else "bytes_transferred_sum",
        "descriptors": "descriptors_total" if ours else "num_descriptors_sum",
        "post_ms": "post_seconds_total" if ours else "post_time_seconds_sum",
    }
    due = 1 + len(SIZES) * ROUNDS
    held = wait_for(lambda: decode.metrics().get(prefix + names["loads"]) == due)
    bench.checks.that(held, f"beside: {due} loads were counted")
    counts = decode.metrics()
    found = {name: counts[prefix + theirs] for name, theirs in names.items()}
    return found | {"post_ms": _ms(found["post_ms"])}


def _damaged(bench: Bench, pair: tuple[Engine, Engine], asked: Tokens, *, ours: bool) -> Answer:
    """A block of the prompt changes in the prefill engine's memory, after it was computed (and digested)."""
    p, d = pair
    held = p.counted().get("prompts_held", 0)
    computed = p.ask(asked, 1, FOR_ANOTHER)
    if ours:
        bench.checks.that(wait_for(lambda: p.counted().get("prompts_held", 0) > held), "beside: a prompt is held")
    p.call("negate_block", str(computed.params["remote_block_ids"][0][1]))
    return d.ask(asked, ANSWER_TOKENS, computed.params)


def _killed(bench: Bench, pair: tuple[Engine, Engine], asked: list[Tokens], *, ours: bool) -> dict[str, Any]:
    """One of two prompts that were computed is wanted while the prefill engine stands still, the other one after it
    was killed."""
    p, d = pair
    computed, due = [], []
    for tokens in asked:
        due.append(p.ask(tokens, ANSWER_TOKENS).tokens)
        computed.append(p.ask(tokens, 1, FOR_ANOTHER).params)
    p.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as worker:
        waiting = worker.submit(d.ask, asked[0], ANSWER_TOKENS, computed[0])
        wait([waiting], timeout=STOPPED_S)
        found = {"stopped_waits": not waiting.done()}
        p.signal(signal.SIGKILL)
        answers = waiting.result(), d.ask(asked[1], ANSWER_TOKENS, computed[1])
    if ours:
        bench.checks.that(not found["stopped_waits"], f"beside: no load waits {STOPPED_S:g} s for a stopped engine")
        bench.checks.that(answers[1].error.startswith("HTTP 5"), f"beside: a killed engine's: {answers[1].error}")
    names = ("stopped", "killed")
    return found | {name: _how(*each) for name, *each in zip(names, answers, due, strict=True)}


def _how(answer: Answer, due: Tokens | None) -> str:
    """How a request ended; `due`: the tokens of an engine that computed it."""
    words = "right tokens" if answer.tokens == due else "wrong tokens"
    said = answer.error or ("served" if due is None else words)
    return f"{said} after {answer.seconds:.2f} s"


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
