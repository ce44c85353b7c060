"""vLLM through pdkv, end to end: `make vllm-e2e`. Prints one JSON object; ends with 0 only if everything held.

Real vLLM servers on CPU, unmodified, in pairs as behind a proxy; what one engine alone answers is what has to come out.
At most two engines run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.checks import Checks
from tests.vllm.bench import ANSWER_TOKENS, BLOCK, Bench, at_once, idle, pages, prompts, wait_for
from tests.vllm.beside import beside
from tests.vllm.engines import FOR_ANOTHER, Answer, Engines, Plan, Tokens, through
from tests.vllm.models import LLAMA, MLA, VOCABULARY, adapter


def llama(bench: Bench) -> dict[str, Any]:
    """Every prompt through a pair, against an engine alone."""
    asked, model = prompts(7), bench.model("llama", LLAMA)
    due = bench.alone(model, asked.all)
    p, d = bench.pair(model)
    sequential = [through(p, d, tokens, ANSWER_TOKENS) for tokens in asked.cold + asked.shared]
    crowd = at_once(lambda tokens: through(p, d, tokens, ANSWER_TOKENS), asked.crowd)
    got = [a.tokens for a in sequential + crowd]
    equal = [bool(a) and a == b for a, b in zip(got, due, strict=True)]
    bench.checks.that(all(equal), f"llama: tokens of {sum(equal)} of {len(equal)} prompts equal those of one engine")
    hits = d.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
    local = d.metrics().get("vllm:prefix_cache_hits_total", 0.0)
    total = sum(map(len, asked.all))
    bench.checks.that(
        hits + local == total, f"llama: decode computed no prompt: {hits:g} loaded and {local:g} cached of {total}"
    )
    shared = sum(500 // BLOCK * BLOCK for _ in asked.shared[1:])
    bench.checks.that(local >= shared, f"llama: decode asked only for what its prefix cache lacked ({local:g} tokens)")
    bench.checks.that(wait_for(lambda: idle(p) and idle(d)), "llama: both engines have all their blocks back")
    counted = d.counted()
    due_pages = sum(map(pages, asked.all)) - local // BLOCK
    bench.checks.that(counted["pages_loaded"] == due_pages, f"llama: {due_pages:g} pages were read and proved")
    bench.checks.that(counted.get("proofs_failed", 0) == 0, "llama: no proof failed")
    first, *_, last = prompts(13).cold[2:5]
    answered = p.ask(first, BLOCK, FOR_ANOTHER)
    bench.checks.that(answered.tokens and not answered.params, "llama: a block that an answer has filled isn't kept")
    follows = first + answered.tokens + last
    turn, own = through(p, d, follows, ANSWER_TOKENS), p.ask(follows, ANSWER_TOKENS)
    bench.checks.that(turn.tokens and turn.tokens == own.tokens, f"llama: but is, for the next turn {turn.error}")
    bench.engines.stop(p, d)
    seconds = [a.seconds for a in sequential[1:]]
    return {
        "prompts": len(equal),
        "equal": sum(equal),
        "decode_answer_median_s": round(statistics.median(seconds), 3),
        **counted,
    }


def mla(bench: Bench) -> dict[str, Any]:
    """Bytes, not tokens: vLLM's MLA on CPU computes no token on KV that it was given, whichever connector brings it
    (with NixlConnector the tokens are as wrong), and it has blocks of 16 and no prefix cache."""
    p, d = bench.pair(bench.model("mla", MLA))
    asked = prompts(7).cold
    answers = [through(p, d, tokens, 2) for tokens in asked]
    bench.checks.that(all(a.tokens for a in answers), "mla: all prompts are served")
    counted, due = d.counted(), sum(-(-len(tokens) // 16) for tokens in asked)
    bench.checks.that(counted["pages_loaded"] == due, f"mla: {due} pages are equal, byte by byte, by their digests")
    bench.checks.that(counted.get("proofs_failed", 0) == 0, "mla: no proof failed")
    bench.checks.that(wait_for(lambda: idle(p) and idle(d)), "mla: both engines have all their blocks back")
    bench.engines.stop(p, d)
    return counted


def lora(bench: Bench) -> dict[str, Any]:
    """Adapters of one name on both engines: "same" is one adapter in two directories, "other" is two adapters. And that
    as a part of vLLM's MultiConnector, which knows parts by their names and sums up their counts."""
    part = {"kv_connector": "PdkvConnector", "kv_connector_module_path": "pdkv.adapters.vllm", "kv_role": "kv_both"}
    where, arguments = bench.folder / "adapters", ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    served = [{"same": 1, "other": 2}, {"same": 1, "other": 3}]
    plans = []
    for side, seeds in zip(("prefill", "decode"), served, strict=True):
        named = [f"{name}={adapter(where / side / name, seed)}" for name, seed in seeds.items()]
        plan = Plan(side, bench.model("llama", LLAMA), "MultiConnector", extra={"connectors": [part]})
        plans.append(replace(plan, arguments=[*arguments, "--lora-modules", *named]))
    p, d = bench.engines.start(*plans)
    tokens = prompts(12).cold[-2]
    got, due = through(p, d, tokens, ANSWER_TOKENS, model="same"), p.ask(tokens, ANSWER_TOKENS, model="same")
    bench.checks.that(got.tokens and got.tokens == due.tokens, f"lora: one adapter at two places {got.error}")
    bench.checks.that(d.counted()["pages_loaded"] == pages(tokens), "lora: and its pages were loaded")
    plain = through(p, d, tokens, ANSWER_TOKENS)
    bench.checks.that(plain.tokens and plain.tokens != got.tokens, "lora: without it other tokens come")
    bench.checks.that(wait_for(lambda: idle(p) and idle(d)), "lora: both engines live, and have their blocks back")
    refused = through(p, d, tokens, ANSWER_TOKENS, model="other")
    bench.checks.that(refused.error == "HTTP 500", "lora: two adapters of one name share no page")
    counted = d.counted()
    bench.checks.that(counted["pages_loaded"] == 2 * pages(tokens), "lora: and none of theirs was loaded")
    mine, theirs = (engine.ask(tokens, ANSWER_TOKENS, model="other") for engine in (d, p))
    bench.checks.that(mine.tokens and mine.tokens != theirs.tokens, "lora: whose tokens differ")
    bench.engines.stop(p, d)
    return counted


def shadow(bench: Bench) -> dict[str, Any]:
    """Two engines of unequal weights, told to refuse nothing: what would have been refused is counted."""
    said: dict[str, Any] = {"shadow": True}
    p, d = bench.engines.start(
        Plan("prefill", bench.model("llama", LLAMA), "PdkvConnector", "kv_producer", said),
        Plan("decode", bench.model("llama", LLAMA, seed=1), "PdkvConnector", "kv_consumer", said),
    )
    answer = through(p, d, prompts(10).cold[-2], 4)
    bench.checks.that(answer.tokens, f"shadow: the request is served {answer.error}")
    here, there = d.counted(), p.counted()
    bench.checks.that(here.get("contract_mismatches") == 1, "shadow: decode has counted a contract that differs")
    bench.checks.that(there.get("contract_mismatches") == 1, "shadow: so has prefill")
    bench.checks.that(here["pages_loaded"] == pages(prompts(10).cold[-2]), "shadow: all pages came all the same")
    bench.engines.stop(p, d)
    return here


def dsa(bench: Bench) -> dict[str, Any]:
    """vLLM's allocation of a sparse model's caches, without its kernels."""
    # in this process, whose stdout is for the report
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from tests.vllm.dsa import run

    found = run(bench.model("llama", LLAMA))
    bench.checks.that(found["groups"] == 1, "dsa: vLLM keeps both caches under one block id")
    bench.checks.that(len(set(found["page_bytes"])) == 1, f"dsa: a page is {found['page_bytes'][2]} B, padded nowhere")
    bench.checks.that(
        found["received"] == ["r"] and found["equal_blocks"] == 3, "dsa: both caches are equal, block by block"
    )
    bench.checks.that(found["others_untouched"], "dsa: and nothing else has changed")
    return found


def killed(bench: Bench) -> dict[str, Any]:
    """The prefill engine stops answering while its pages are wanted, then dies, then comes back at the same address."""
    model, (long, short) = bench.model("llama", LLAMA), prompts(8).cold[-1:-3:-1]
    p, d = bench.pair(model)
    bench.checks.that(through(p, d, short, 4).tokens, "killed: the pair works")
    computed = p.ask(long, 1, FOR_ANOTHER)
    p.signal(signal.SIGSTOP)
    ended: list[Answer] = []
    waiting = threading.Thread(target=lambda: ended.append(d.ask(long, 4, computed.params)))
    waiting.start()
    bench.checks.that(
        d.ask(short[:50], 4).tokens, "killed: decode goes on with others while one waits for a stopped engine"
    )
    p.signal(signal.SIGKILL)
    waiting.join()
    bench.checks.that(ended[0].error.startswith("HTTP 5"), f"killed: its request ends in an error ({ended[0].error})")
    bench.checks.that(not ended[0].tokens, "killed: and gives no token")
    bench.checks.that(wait_for(lambda: idle(d)), "killed: decode has its blocks back")
    bench.engines.stop(p)
    (again,) = bench.engines.start(Plan("prefill-again", model, "PdkvConnector", "kv_producer", side_port=p.side_port))
    back = through(again, d, long, 4)
    bench.checks.that(back.tokens, f"killed: its next life is used at once {back.error}")
    bench.engines.stop(again, d)
    return {"ended_after_s": round(ended[0].seconds, 2)}


def mismatch(bench: Bench) -> dict[str, Any]:
    """Engines that must not be paired, each refused by the field that differs."""
    model, tokens = bench.model("llama", LLAMA), prompts(9).cold[-2]
    (p,) = bench.engines.start(Plan("prefill", model, "PdkvConnector", "kv_producer"))
    alone = p.ask(tokens, 4).tokens
    found: dict[str, list[str]] = {}
    decode = Plan("decode", model, "PdkvConnector", "kv_consumer")
    for name, field, plan in (
        ("other weights", "weights_id", replace(decode, model=bench.model("llama", LLAMA, seed=1))),
        ("another dtype", "segments", replace(decode, dtype="bfloat16")),
        ("another block size", "page_tokens", replace(decode, block_tokens=128, on_failure="recompute")),
    ):
        (d,) = bench.engines.start(plan)
        answer = through(p, d, tokens, 4)
        log = d.log.read_text()
        found[name] = [
            f for f in ("weights_id", "page_tokens", "segments", "main_row_bytes", "rope_dtype") if f"{f}: mine" in log
        ]
        bench.checks.that(field in found[name], f"mismatch: {name} is refused by {', '.join(found[name])}")
        if plan.on_failure == "recompute":
            bench.checks.that(answer.tokens == alone, "mismatch: under recompute, decode computes the prompt itself")
        else:
            bench.checks.that(answer.error.startswith("HTTP 5"), f"mismatch: the request fails ({answer.error})")
        bench.engines.stop(d)
    bench.engines.stop(p)
    return {"fields": found}


def steps(bench: Bench) -> dict[str, Any]:
    """What loads cost the engine's steps: the time between two tokens of an answer while nothing arrives, while prompts
    are loaded, and while the same arrive again and are cached; in turns.

    Each prompt costs decode a step of one token, its last. They are computed beforehand, so that the prefill engine
    takes no CPU meanwhile.
    """
    p, d = bench.pair(bench.model("llama", LLAMA))
    draw = random.Random(11)
    found = {name: list[float]() for name in ("quiet", "loaded", "cached")}

    def some(count: int) -> Tokens:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    def answered(name: str, arriving: Sequence[tuple[Tokens, dict[str, Any] | None]]) -> None:
        """An answer that is given by itself, and then while prompts arrive one after the other."""
        at: list[float] = []

        def follow() -> None:
            for moment in d.stream(some(40), 400):
                at.append(moment)

        with ThreadPoolExecutor(1) as worker:
            running = worker.submit(follow)
            bench.checks.that(wait_for(lambda: len(at) > 60), f"steps: an answer is given, {name}")
            began_s = time.monotonic()
            answers = [d.ask(tokens, 1, params) for tokens, params in arriving]
            ended_s = time.monotonic()
            running.result()
        bench.checks.that(all(a.tokens for a in answers), f"steps: prompts came meanwhile, {name}")
        for before, after in pairwise(at):
            if after < began_s:
                found["quiet"].append(after - before)
            elif began_s < before and after < ended_s:
                found[name].append(after - before)

    bench.checks.that(through(p, d, some(100), 1).tokens, "steps: the pair works")
    for _ in range(6):
        asked = [some(23 * BLOCK + 1) for _ in range(6)]
        computed = [p.ask(tokens, 1, FOR_ANOTHER).params for tokens in asked]
        answered("loaded", list(zip(asked, computed, strict=True)))
        answered("cached", [(tokens, None) for tokens in asked])
    bench.checks.that(min(map(len, found.values())) > 30, "steps: there were enough of each")
    counted = d.counted()
    bench.engines.stop(p, d)
    figures = {name: _spread(seconds) for name, seconds in found.items()}
    return {**figures, **{name: counted[name] for name in ("loads", "bytes_loaded", "load_seconds")}}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """The mean, because a busy server sends several tokens at once, and the longest, which is its doing as well."""
    mean_ms, most_ms = (round(1e3 * s, 2) for s in (statistics.fmean(seconds), max(seconds)))
    return {"steps": len(seconds), "mean_ms": mean_ms, "most_ms": most_ms}


CASES = {case.__name__: case for case in (llama, killed, mismatch, shadow, lora, mla, dsa, steps, beside)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--folder", type=Path, help="where models and logs go; kept")
    options = parser.parse_args()
    checks, began_s = Checks(), time.monotonic()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only.split(","):
            case_s, found = time.monotonic(), dict[str, Any]()
            try:
                with Engines(folder) as engines:
                    found = CASES[name](Bench(engines, folder, checks))
            except (RuntimeError, OSError) as error:
                checks.that(False, f"{name}: {error}")  # an engine has ended, or didn't start in time
            # whoever reads a figure needs to know what else ran
            report[name] = found | {"seconds": round(time.monotonic() - case_s, 1), "load_1m": os.getloadavg()[0]}
            print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)
    report |= {"checks": checks.passed, "failed": checks.failed, "seconds": round(time.monotonic() - began_s, 1)}
    print(json.dumps(report, indent=1))
    return bool(checks.failed)


if __name__ == "__main__":
    sys.exit(main())
