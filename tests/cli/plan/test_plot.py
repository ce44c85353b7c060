"""The picture is written, or it is said why not."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.plan.figures import make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.cli.plan.plot import draw
from pdkv.errors import ConfigError, MissingDependency


@pytest.mark.parametrize("options", [{}, {"gpu": "h200", "gpus": 8, "dcp": 2}, {"memory": "56GB"}])
def test_a_picture(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    draw(make_plan(PlanOptions(model="glm-5.3", **options)), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_another_format(tmp_path: Path) -> None:
    draw(make_plan(PlanOptions(model="tiny")), str(tmp_path / "plan.svg"))
    text = (tmp_path / "plan.svg").read_text("utf-8")
    assert "<svg" in text


@pytest.mark.parametrize("name", ["plan.txt", "plan", "missing/plan.png"])
def test_a_file_that_can_not_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plot"):
        draw(make_plan(PlanOptions(model="tiny")), str(tmp_path / name))


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[plots\]'"):
        draw(make_plan(PlanOptions(model="tiny")), str(tmp_path / "plan.png"))
