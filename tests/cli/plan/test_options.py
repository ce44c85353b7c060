"""Options that belong together, and those that don't."""

import pytest

from pdkv.cli.plan.options import PlanOptions
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
        ({"memory": "1GB", "reserve": "1GB"}, "reserve"),
        ({"memory": "1GB", "weights": "fp8"}, "weights"),
        ({"memory": "1GB", "mem_fraction_static": 0.9}, "mem_fraction_static"),
        ({"weights": "bf16"}, "weights"),
        ({"gpu": "h200", "memory": "1GB", "diagnose": "step", "reserve": "0"}, "reserve"),
        ({"gpu": "h200", "memory": "1GB", "diagnose": "step", "tp": 8}, "tp"),
        ({"model": None}, "model"),
        ({"model": None, "diagnose": "pool"}, "model"),
        ({"model": None, "node": "a:1", "insecure": True, "gpu": "h200", "gpus": 8}, "gpus"),
        ({"diagnose": "pool", "plot": "a.png"}, "plot"),
        ({"node": "a:1", "insecure": True, "hit": 0}, "hit"),
        ({"node": "a:1", "insecure": True, "short_requests": 7}, "short_requests"),
        ({"diagnose": "pool", "details": True}, "details"),
        ({"node": "a:1", "insecure": False}, "insecure"),
        ({"node": "a:1", "insecure": False, "tls_ca": "ca.pem"}, "tls_certificate"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        PlanOptions(**{"model": "tiny", **given}).check()  # type: ignore[arg-type]
    assert error.value.fields["field"] == field


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gpu": "h200", "tp": 8, "dcp": 2},
        {"dcp": 2},
        {"gpu": "h200", "memory": "1GB", "diagnose": "step"},
        {"node": "a:1", "insecure": True, "probe": 2048, "given": ["a=1"]},
        {"model": None, "node": "a:1", "insecure": True, "gpu": "h200", "memory": "1GB"},
        {"gpu": "h200", "reserve": "1GB", "weights": "bf16", "mem_fraction_static": 0.8, "hit": 7},
    ],
)
def test_options_that_do(given: dict[str, object]) -> None:
    PlanOptions(**{"model": "tiny", **given}).check()  # type: ignore[arg-type]
