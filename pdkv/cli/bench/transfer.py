"""`pdkv bench transfer`: pulls between two processes or two hosts, over the code that serves.

Guarantees: exit code 0 only if every byte that was compared was right, 1 otherwise, 2 for a named error; with `--json`
one object on stdout and everything else on stderr; no process is left behind, also after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pdkv.cli.bench.cases import Case, Fitted, fit
from pdkv.cli.bench.transfer_options import TransferOptions
from pdkv.cli.client import options_command
from pdkv.cli.signals import run
from pdkv.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from rich.console import Console

    from pdkv.cli.bench.rows import Plot
    from pdkv.cli.bench.sweep import Sweep, SweepSettings
    from pdkv.cli.bench.workers import SinkProcess
    from pdkv.rpc.bench import GrpcBench
    from pdkv.rpc.security import Security

WRONG = 1
NEEDED = ("torch", "nixl")
WIDE = 160
HUGE_SHARE = 0.9

HELP = """Measure pulls of pages from a prefill to a decode node: the path of a served request, without a model.

A source is a prefill node whose engine takes no time, a sink is a decode node, each a process of its own. A repetition
is a request: asked, announced, read, proved, committed. One large descriptor through raw NIXL takes turns with it: the
ceiling. Its pages are zeroed before it and compared after it. Exit code 1: bytes were wrong.

The first value of each list is the base case's; each other value is measured by itself.

**Examples**

`pdkv bench transfer`: both processes on this host, in less than a minute.

`pdkv bench transfer --pages 512,1 --repetitions 9 --baselines all --json`: two sizes, against all there is.

`pdkv bench transfer --role source --bind 0.0.0.0:7100 --advertise p0.fleet --raw-bind 0.0.0.0:7101 --insecure`: on one
host, and on the other one

`pdkv bench transfer --role sink --connect p0.fleet:7100 --raw-source p0.fleet:7101 --insecure --plot rows.svg`
"""


def run_transfer(options: TransferOptions) -> None:
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "the benchmark")
    options.check()
    security = options.secured()
    if options.role == "source":
        from pdkv.cli.bench.source_service import run_source

        return run_source(options)
    from pdkv.cli.bench.rows import Plot

    fitted = _fitting(options)
    plot = Plot(Path(options.plot)) if options.plot else None
    sweep = run(_shown(options, security, fitted))
    _told(options, sweep, fitted, plot)
    if any(row.wrong for row in sweep.rows):
        raise SystemExit(WRONG)


def _fitting(options: TransferOptions) -> Fitted:
    from pdkv.geometry.model_config import load_config, model_shape
    from pdkv.geometry.page_layout import page_format

    page_bytes = page_format(model_shape(load_config(options.model))).page_bytes
    cases = options.sweep().cases(every=options.product)
    fitted = fit(cases, page_bytes, options.memory_bytes())
    if not fitted.cases:
        raise ConfigError("memory", options.memory or "an eighth of what is free", fitted.left_out[0])
    return fitted


def settings_of(options: TransferOptions) -> SweepSettings:
    """Raises `ConfigError` for a baseline that there isn't."""
    from pdkv.cli.bench.link import link_gbit_per_s
    from pdkv.cli.bench.pair import Nodes
    from pdkv.cli.bench.sweep import SweepSettings
    from pdkv.cli.bench.yardsticks import Kind

    devices = [name.strip() for name in options.net_devices.split(",") if name.strip()]
    remote = options.role == "sink"
    return SweepSettings(
        nodes=Nodes(options.model, options.ucx_tls, options.net_devices, options.name, options.damage),
        repetitions=options.times(),
        baselines=tuple(Kind(name) for name in options.kinds()),
        ceiling=not remote or bool(options.raw_source),
        raw_source=options.raw_source,
        # within one host nothing goes over a link, unless the caller says so
        link_gbit_per_s=options.link_gbit or (link_gbit_per_s(devices) if remote else 0.0),
    )


@asynccontextmanager
async def sides(
    options: TransferOptions, security: Security, cases: list[Case]
) -> AsyncIterator[tuple[dict[str, GrpcBench], list[SinkProcess]]]:
    """Sources that run, here or elsewhere, and sinks that run here, as many as the cases need."""
    from pdkv.cli.bench.pulls import SourceSettings
    from pdkv.cli.bench.workers import Workers
    from pdkv.rpc.bench import GrpcBench
    from pdkv.rpc.channels import Channels
    from pdkv.rpc.client import ClientSettings

    async with AsyncExitStack() as held:
        workers = await held.enter_async_context(Workers())
        channels = Channels(security)
        held.push_async_callback(channels.close)
        addresses = options.addresses
        if options.role == "both":
            memory_bytes = options.memory_bytes()
            addresses = tuple(
                [
                    await workers.source(
                        SourceSettings(f"source-{i}", memory_bytes, options.ucx_tls, options.net_devices), security
                    )
                    for i in range(max(case.sources for case in cases))
                ]
            )
        sinks = [await workers.sink(f"sink-{i}", security) for i in range(max(case.sinks for case in cases))]
        yield {address: GrpcBench(address, channels, ClientSettings()) for address in addresses}, sinks


async def _shown(options: TransferOptions, security: Security, fitted: Fitted) -> Sweep:
    """With a table that fills up on a terminal, or a line a step elsewhere."""
    from rich.console import Group
    from rich.live import Live
    from rich.spinner import Spinner

    from pdkv.cli.bench.rows import table
    from pdkv.cli.bench.sweep import Sweep

    console = _console(options)
    spinner = Spinner("dots", "starting")

    def say(text: str) -> None:
        spinner.update(text=text)
        if not console.is_terminal:
            console.print(text, highlight=False)

    settings = settings_of(options)
    async with sides(options, security, fitted.cases) as (sources, sinks):
        sweep = Sweep(settings, sources, sinks, say)
        live = Live(
            console=console,
            get_renderable=lambda: Group(table(sweep.rows), spinner),
            transient=True,
            refresh_per_second=2,
        )
        with live if console.is_terminal else nullcontext():
            await sweep.run(fitted.cases)
    return sweep


def _told(options: TransferOptions, sweep: Sweep, fitted: Fitted, plot: Plot | None) -> None:
    from pdkv.cli.bench.report import stamp
    from pdkv.cli.bench.rows import write_csv

    _print(_console(options), sweep, fitted)
    if options.csv:
        write_csv(sweep.rows, Path(options.csv))
    if plot is not None:
        plot.draw(sweep.rows, f"{options.model}, pages of {sweep.rows[0].page_bytes:,} B")
    if options.json_:
        found = {
            "machine": stamp(),
            "model": options.model,
            "page_bytes": sweep.rows[0].page_bytes,
            "ok": not any(row.wrong for row in sweep.rows),
            "left_out": fitted.left_out,
            "absent": sweep.absent,
            "rows": [row.facts() for row in sweep.rows],
        }
        print(json.dumps(found))


def _console(options: TransferOptions) -> Console:
    """Into a file or a pipe tables go as wide as they are."""
    from rich.console import Console

    console = Console(stderr=options.json_)
    if not console.is_terminal:
        console.width = WIDE
    return console


def _print(console: Console, sweep: Sweep, fitted: Fitted) -> None:
    from pdkv.cli.bench.rows import baseline_table, table

    console.print(table(sweep.rows))
    if sweep.settings.baselines:
        console.print(baseline_table(sweep.rows, sweep.absent))
    for words in fitted.left_out:
        console.print(f"left out: {words}", style="dim", highlight=False)
    shares = [share for row in sweep.rows for share in (row.source_huge, row.sink_huge) if share is not None]
    if shares and min(shares) < HUGE_SHARE:
        words = f"only {min(shares):.0%} of a pool is on huge pages: copies in a host take twice as long on small ones"
        console.print(words, style="yellow", highlight=False)
    for row in sweep.rows:
        if row.failure:
            console.print(f"{row.case}: {row.failure}", style="red", highlight=False)
    wrong = sum(row.wrong for row in sweep.rows)
    console.print(f"[bold red]{wrong} wrong[/]" if wrong else "[bold green]every byte was right[/]")


transfer = options_command(TransferOptions, run_transfer, HELP)
