"""The picture has a line a policy, or it is said before any run why there is none."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, MissingDependency
from pdkv.replay.plot import Plot
from pdkv.replay.run import ReplayResult, ReplaySettings


def results() -> list[ReplayResult]:
    return [
        ReplayResult(ReplaySettings(pages, policy), prompt_pages=100, hit_pages=pages // 10)
        for pages in (400, 100, 200)
        for policy in ("lru", "fifo")
    ]


def test_a_picture(tmp_path: Path) -> None:
    Plot(str(tmp_path / "rates.png")).draw("title", results())
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_its_lines() -> None:
    plot = Plot("rates.SVG")
    plot._path = "/dev/null/rates.svg"
    with pytest.raises(ConfigError, match="written"):
        plot.draw("title", results())
    (axes,) = plot._figure.axes
    assert [line.get_label() for line in axes.lines] == ["lru", "fifo"]
    for line in axes.lines:
        assert line.get_xydata().tolist() == [[100, 0.1], [200, 0.2], [400, 0.4]]


@pytest.mark.parametrize("name", ["rates.txt", "rates", "missing/rates.png"])
def test_a_file_that_can_not_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plot"):
        Plot(str(tmp_path / name))


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[plots\]'"):
        Plot(str(tmp_path / "rates.png"))
