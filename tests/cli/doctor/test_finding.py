import pytest

from pdkv.cli.doctor.finding import Level, fail, ok, size, warn


def test_what_is_not_well_says_what_to_do() -> None:
    assert (ok("a", "b").level, warn("a", "b", "c").level, fail("a", "b", "c").level) == tuple(Level)
    for make in (warn, fail):
        with pytest.raises(AssertionError):
            make("a", "b", "")


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 8 << 20, 3_452_160, 56 << 30)] == [
        "0 B",
        "1023 B",
        "8 MiB",
        "3.292 MiB",
        "56 GiB",
    ]
