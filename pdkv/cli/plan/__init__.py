"""`pdkv plan`: what a model's two caches cost, whether they fit, and why a running pool isn't what was planned.

Guarantees: needs a config alone, and imports neither torch nor nixl nor transformers, and gRPC only for `--node`; text,
`--json` and plot show the same figures. Exit code 0: every context fits, or nothing is wrong; 3: one doesn't, or
something is; 2: bad input.
"""

from __future__ import annotations

import json

import typer

from pdkv.cli.client import options_command
from pdkv.cli.plan.options import PlanOptions

DOES_NOT_FIT = 3
"""Exit code when a context doesn't fit, or a complaint has a cause."""

HELP = """Count the bytes of a model's two caches: a token, a page, a context, a pool.

Needs only a config.json: no GPU, no torch, no weights. Presets: glm-5.3, glm-5.3-mtp, deepseek-v3.2, tiny.
Exit code 3: a context doesn't fit, or a complaint has a cause.

**Examples**

`pdkv plan --model glm-5.3`: bytes by cache, and seconds on a 400 Gbit/s link.

`pdkv plan --model glm-5.3 --context 1048576 --memory 56GB`: does a 1M-token request with 256 output tokens fit? No
(exit code 3), and it says how many pages and bytes are missing, and what would make it fit.

`pdkv plan --model glm-5.3 --gpu h200 --gpus 8 --dcp 2`: weights by part, and what a rank has left for pages.

`pdkv plan --model ./config.json --draft-layers 1 --json | jq .bytes_per_page`: a model of your own, with one MTP layer.

`pdkv plan --model glm-5.3 --hit 100000 --context 1048576`: what a prefix hit saves, and what not.

`pdkv plan --model glm-5.3 --diagnose pool --given memory_bytes=56GB,usable_pages=15536`: why the pool is smaller.

`pdkv plan --node 127.0.0.1:7001 --insecure --context 16384 --probe 2048 --given memory_bytes_per_s=2e10`: all four
complaints, from a running node, which knows its model itself.

**Keys of --given** (a node fills in what it knows; what is given wins)

pool: memory_bytes, usable_pages, page_bytes, dcp, rollback_tokens. refused: request_tokens, total_pages, free_pages,
cached_pages, locked_pages, quarantined_pages, dcp. ttft: prompt_tokens, hit_tokens, cold_ttft_s, ttft_s, prefill_s,
exposed_transfer_s, shipped_pages. step: context_tokens, step_s, short_context_tokens, short_step_s,
memory_bytes_per_s, requests, engine.
"""


def run_plan(options: PlanOptions) -> None:
    from pdkv.cli.plan.complaints import answer
    from pdkv.cli.plan.figures import make_plan
    from pdkv.cli.plan.objects import findings_object, plan_object
    from pdkv.cli.plan.text import findings_text, plan_text, show

    options.check()
    if options.complains:
        answers = answer(options)
        typer.echo(json.dumps(findings_object(answers))) if options.json else show(findings_text(answers))
        fine = not answers.wrong
    else:
        plan = make_plan(options)
        if options.plot is not None:
            from pdkv.cli.plan.plot import draw

            draw(plan, options.plot)
        typer.echo(json.dumps(plan_object(plan))) if options.json else show(plan_text(plan))
        fine = plan.fits
    if not fine:
        raise typer.Exit(DOES_NOT_FIT)


plan = options_command(PlanOptions, run_plan, HELP)
