"""Tests that need a CUDA device: skipped by name, with the reason, where there is none. The only ones that may be."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda:0"


def reason() -> str:
    """Why they can't run here; empty: they can."""
    if torch.cuda.is_available():
        return ""
    return f"needs a CUDA device: torch {torch.__version__} finds none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if words := reason():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=words))


@pytest.fixture
def device() -> str:
    return DEVICE
