"""Options that belong together, and those that don't."""

import inspect

import pytest

from pdkv.cli.plan.options import PlanOptions, plan_command
from pdkv.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tp": 8}, "tp"),
        ({"gpus": 8}, "gpus"),
        ({"gpu": "h200", "memory": "1GB"}, "memory"),
        ({"given": ["a=1"]}, "given"),
        ({"probe": 2048}, "probe"),
        ({"probe": 2048, "diagnose": "step"}, "probe"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        PlanOptions(model="tiny", **given).check()  # type: ignore[arg-type]
    assert error.value.fields["field"] == field


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gpu": "h200", "tp": 8, "dcp": 2},
        {"dcp": 2},
        {"gpu": "h200", "memory": "1GB", "diagnose": "step"},
        {"node": "a:1", "probe": 2048, "given": ["a=1"]},
    ],
)
def test_options_that_do(given: dict[str, object]) -> None:
    PlanOptions(model="tiny", **given).check()  # type: ignore[arg-type]


def test_a_field_is_an_option() -> None:
    seen: list[PlanOptions] = []
    command = plan_command(seen.append, "words")
    parameters = inspect.signature(command).parameters
    assert parameters["model"].default is inspect.Parameter.empty
    assert parameters["gbps"].default == 400.0
    command(model="tiny", hit=7)
    assert (seen[0].model, seen[0].hit) == ("tiny", 7)
    assert command.__doc__ == "words"
