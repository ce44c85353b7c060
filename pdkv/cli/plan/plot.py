"""A plan as a picture: bytes over contexts, and what-ifs beside each other.

Guarantees: shows figures of the plan and none of its own; draws without a display; matplotlib is asked for only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdkv.cli.plan.figures import Plan
from pdkv.errors import ConfigError, MissingDependency
from pdkv.geometry import byte_ledger as ledger

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def draw(plan: Plan, path: str) -> None:
    """Writes the picture. Raises `MissingDependency` without matplotlib, `ConfigError` if `path` can't be written."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError("plot", path, f"a file that ends in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("matplotlib", "--plot", extra="plots") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{plan.model}, main rows of {plan.fmt.main_row.row_bytes} B")
    _draw_contexts(plan, left)
    _draw_variants(plan, right)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError("plot", path, f"a file that can be written ({error.strerror})") from error


def _draw_contexts(plan: Plan, axes: Axes) -> None:
    """Both caches stacked, and the pool's memory as a line. A context takes whole pages."""
    longest = plan.longest.tokens
    tokens = [longest * i // 64 for i in range(65)]
    page = ledger.page_group_bytes(plan.fmt)
    sizes = [page.times(ledger.request_pages(n, page_tokens=plan.fmt.page_tokens)) for n in tokens]
    main, index = [s.main / 1e9 for s in sizes], [s.index / 1e9 for s in sizes]
    axes.stackplot(tokens, main, index, labels=["main KV", "index-K"])
    if plan.pool is not None:
        dcp = f" (dcp {plan.setup.layout.dcp})" if plan.setup.layout.dcp > 1 else ""
        axes.axhline(plan.pool.available_bytes / 1e9, color="black", linestyle="--", label=f"a rank's pool{dcp}")
    axes.set(title="Bytes of one context", xlabel="tokens", ylabel="GB", xlim=(0, longest))
    axes.legend(loc="upper left")


def _draw_variants(plan: Plan, axes: Axes) -> None:
    """Tokens of the pool where there is one, else bytes a token of context."""
    names = [v.name for v in plan.what_if]
    if plan.pool is not None:
        values = [(v.pool_tokens or 0) / 1e6 for v in plan.what_if]
        axes.set(title="What if: tokens of a rank's pool", xlabel="million tokens")
    else:
        values = [v.bytes_per_slot.total / v.dcp / 1e3 for v in plan.what_if]
        axes.set(title="What if: bytes a token of context", xlabel="kB")
    bars = axes.barh(names, values, color=["tab:orange", *["tab:blue"] * (len(names) - 1)])
    axes.bar_label(bars, fmt="{:.2f}", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
