"""The benchmark of tracing: what it shows is what was measured, against the fleet without."""

from __future__ import annotations

from rich.console import Console

from benchmarks.tracing import FLEETS, ROLES, Group, free_ports, shown


def test_each_fleet_is_shown_against_the_one_without() -> None:
    groups = {name: Group({}, {role: [2.0 + i, 9.0, 1.0 + i] for role in ROLES}) for i, name in enumerate(FLEETS)}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(shown(groups))
    rows = {line.split("  ")[1]: line for line in captured.get().splitlines() if line.startswith("  ")}
    assert rows["without"].split()[1:] == ["2.00"] * len(ROLES)
    assert rows["all kept"].count("3.00 (+1.00)") == len(ROLES)
    assert rows["1 in 100"].count("4.00 (+2.00)") == len(ROLES)


def test_ports_are_different_ones() -> None:
    assert len(set(free_ports(3))) == 3
