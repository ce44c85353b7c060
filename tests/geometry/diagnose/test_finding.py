"""What every finding has, and what no number of a complaint may be."""

from dataclasses import dataclass

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.diagnose.finding import NOTHING_WRONG, fine, require_counts, wrong


@dataclass(frozen=True)
class Facts:
    a_bytes: int
    b_s: float = 1.0
    c: int | None = None


def test_fine_and_wrong() -> None:
    good = fine("a complaint", {"a": 1}, "as it should be")
    assert (good.wrong, good.finding, good.way_out) == (False, f"{NOTHING_WRONG}: as it should be", ())
    bad = wrong("a complaint", {"a": 1}, "a cause", "one way", "another")
    assert (bad.wrong, bad.numbers, bad.way_out) == (True, {"a": 1}, ("one way", "another"))


def test_counts() -> None:
    require_counts(Facts(0))
    for facts, field in (
        (Facts(-1), "a_bytes"),
        (Facts(0, float("nan")), "b_s"),
        (Facts(0, float("inf")), "b_s"),
        (Facts(0, c=-1), "c"),
    ):
        with pytest.raises(ConfigError) as error:
            require_counts(facts)
        assert error.value.fields["field"] == field
