"""The transfer engine (under construction): re-exports its orders."""

from __future__ import annotations

from pdkv.transfer.orders import Probe, ReadOrder, ReadOutcome, ReadStatus

__all__ = ["Probe", "ReadOrder", "ReadOutcome", "ReadStatus"]
