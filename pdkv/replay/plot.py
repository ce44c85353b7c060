"""Hit rate against pool size, a line a policy.

Guarantees: what can't be drawn or written is refused before the runs, as far as it can be known; draws without a
display; matplotlib is asked for only here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pdkv.errors import ConfigError, MissingDependency
from pdkv.replay.run import ReplayResult

SUFFIXES = (".png", ".svg", ".pdf")


class Plot:
    """A picture that is to be made."""

    def __init__(self, path: str) -> None:
        """Raises `MissingDependency` without matplotlib, `ConfigError` if it can't be a picture's path."""
        if Path(path).suffix.lower() not in SUFFIXES or not Path(path).parent.is_dir():
            raise ConfigError("plot", path, f"a file in a folder that exists, that ends in {', '.join(SUFFIXES)}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependency("matplotlib", "--plot", extra="plots") from error
        self._path = path
        self._figure = Figure(figsize=(8, 5), layout="constrained")

    def draw(self, title: str, results: Sequence[ReplayResult]) -> None:
        """Raises `ConfigError` if the file can't be written."""
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for result in results:
            lines[result.settings.policy].append((result.settings.pages, result.hit_rate))
        axes = self._figure.subplots()
        # equal lines lie on each other: the wider one below can still be seen
        for at, (policy, points) in enumerate(lines.items()):
            pages, rates = zip(*sorted(points), strict=True)
            axes.plot(
                pages, rates, marker="o", markersize=4, linewidth=1 + 1.5 * (len(lines) - at), alpha=0.7, label=policy
            )
        axes.set(title=title, xlabel="pages of the pool", ylabel="hit rate of full prompt pages", xscale="log")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        try:
            self._figure.savefig(self._path, dpi=120)
        except OSError as error:
            raise ConfigError("plot", self._path, f"a file that can be written ({error.strerror})") from error
