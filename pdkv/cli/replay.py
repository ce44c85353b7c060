"""`pdkv replay`: a request trace through the cache manager, without a model.

Guarantees: text, `--json` and plot show the same runs; progress goes to stderr, and only where somebody watches. Exit
code 0: replayed, refused requests or not; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.replay.run import ReplayResult, ReplaySettings

INTERRUPTED = 130
PLOT_SIZES = 7
"""Pool sizes of a plot for which none are given: each half of the next."""
_BAR = 40

HELP = """Run a request trace (Mooncake's format) through the real cache manager: hit rate, evictions, refusals, time.

No model and no memory for pages: page table, radix tree, locks and eviction are real. Requests come one after the
other; what a trace doesn't tell is in docs/replay.md.

**Examples**

`pdkv replay conversation_trace.jsonl --pages 200000`: what a pool of 200,000 pages of 64 tokens would have found.

`pdkv replay conversation_trace.jsonl --pages 200000 --policy all --json | jq '.runs[] | {policy, hit_rate}'`

`pdkv replay conversation_trace.jsonl --pages 2300000 --plot rates.png`: all policies over pools of many sizes.
"""


def replay(
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="JSONL file: timestamp, input_length, output_length, hash_ids a line."),
    ],
    pages: Annotated[int, typer.Option(metavar="PAGES", help="Pages of the pool that can be handed out; at least 1.")],
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="lru|lfu|fifo|priority|all", help="Which pages are evicted first. Default: lru; all for a plot."
        ),
    ] = None,
    eagle_rule: Annotated[
        str, typer.Option(metavar="none|bigram|drop_page", help="How a prefix hit falls back for a draft head.")
    ] = "none",
    page_tokens: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of a page; a divisor of 512.")] = 64,
    sizes: Annotated[
        str | None, typer.Option(metavar="PAGES,...", help="More pool sizes to run, with commas between them.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Only the first N requests; at least 1.")] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw hit rate against pool size: .png, .svg or .pdf.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the first run; all are in runs.")
    ] = False,
) -> None:
    from pdkv.replay.plot import Plot
    from pdkv.replay.run import replay as run
    from pdkv.replay.trace import read_trace

    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "at least 1")
    picture = None if plot is None else Plot(plot)
    wanted = _sizes(pages, sizes, for_plot=plot is not None)
    policies = _policies(policy or ("lru" if plot is None else "all"))
    settings = [_settings(size, name, eagle_rule, page_tokens) for size in wanted for name in policies]
    requests = read_trace(trace, limit=limit)
    results: list[ReplayResult] = []
    try:
        with _progress(len(requests) * len(settings)) as progress, _kept_from_the_collector():
            results += (run(requests, each, progress) for each in settings)
    except KeyboardInterrupt:
        print(f"pdkv: interrupted after {len(results)} of {len(settings)} runs", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if picture is not None:
        picture.draw(f"{len(requests):,} requests, EAGLE rule {eagle_rule}", results)
    if json_:
        typer.echo(json.dumps(to_dict(trace, results)))
    else:
        typer.echo("\n".join(_text(results)))


replay.__doc__ = HELP


def to_dict(trace: str, results: Sequence[ReplayResult]) -> dict[str, Any]:
    """The JSON object: the first run's facts, and `runs` with all of them."""
    runs = [_run(result) for result in results]
    return {"trace": trace, **runs[0], "runs": runs}


def _run(result: ReplayResult) -> dict[str, Any]:
    return {
        **asdict(result.settings),
        "requests": result.requests,
        "refused": result.refused,
        "prompt_pages": result.prompt_pages,
        "hit_pages": result.hit_pages,
        "hit_rate": result.hit_rate,
        "evicted_pages": result.evicted_pages,
        "us_per_request": result.us_per_request,
        "us_by_call": result.us_by_call,
        "hits_by_length": [{"from": least, "to": most, "requests": count} for least, most, count in _classes(result)],
        "census": result.census,
        "recounts": result.recounts,
    }


def _classes(result: ReplayResult) -> Iterator[tuple[int, int, int]]:
    """(fewest pages, most pages, requests) of each class of hit lengths, also of those between that are empty."""
    last = max(result.hits_by_length, default=-1)
    least = 0
    while least <= last:
        yield least, max(2 * least - 1, 0), result.hits_by_length.get(least, 0)
        least = max(2 * least, 1)


def _text(results: Sequence[ReplayResult]) -> Iterator[str]:
    names = f"{'hit rate':>8}  {'hit pages':>10}  {'evicted':>10}  {'refused':>8}"
    yield f"{'pages':>10}  {'policy':8}  {names}  µs/request"
    for r in results:
        yield (
            f"{r.settings.pages:>10,}  {r.settings.policy:8}  {r.hit_rate:>8.5f}  {r.hit_pages:>10,}  "
            f"{r.evicted_pages:>10,}  {r.refused:>8,}  {r.us_per_request:>10.1f}"
        )
    first = results[0]
    calls = ", ".join(f"{name} {us:.1f}" for name, us in first.us_by_call.items())
    pages = ", ".join(f"{count:,} {what}" for what, count in first.census.items())
    yield f"\nThe first run: {first.requests:,} requests, {first.prompt_pages:,} full prompt pages"
    yield f"µs of CPU a request: {calls}"
    yield f"pages at the end, after {first.recounts} recounts: {pages}"
    yield "\nRequests by pages hit"
    most = max(first.hits_by_length.values(), default=1)
    for least, last, count in _classes(first):
        span = f"{least:,}" if last <= least else f"{least:,} to {last:,}"
        yield f"{span:>20}  {count:>8,}  {'█' * round(_BAR * count / most)}"


def _sizes(pages: int, more: str | None, *, for_plot: bool) -> list[int]:
    """`pages` first, each size once."""
    if more is None:
        halves = [pages >> i for i in range(PLOT_SIZES if for_plot else 1)]
        return list(dict.fromkeys([pages, *(size for size in halves if size > 0)]))
    try:
        return list(dict.fromkeys([pages, *(int(part) for part in more.split(",") if part.strip())]))
    except ValueError as error:
        raise ConfigError("sizes", more, "numbers of pages with commas between them") from error


def _policies(name: str) -> list[str]:
    from pdkv.kvcache.eviction import ORDERS

    if name not in (*ORDERS, "all"):
        raise ConfigError("policy", name, ", ".join((*ORDERS, "all")))
    return list(ORDERS) if name == "all" else [name]


def _settings(pages: int, policy: str, eagle_rule: str, page_tokens: int) -> ReplaySettings:
    from pdkv.kvcache.eagle import EagleRule
    from pdkv.replay.run import ReplaySettings

    if eagle_rule not in list(EagleRule):
        raise ConfigError("eagle_rule", eagle_rule, ", ".join(EagleRule))
    return ReplaySettings(pages, policy, EagleRule(eagle_rule), page_tokens)


@contextmanager
def _kept_from_the_collector() -> Iterator[None]:
    """A walk of Python's collector over the whole trace would count as time of the manager's call that it falls into:
    no node has a trace. What the runs themselves make is collected as ever."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, gone at the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.advance(task, done)
