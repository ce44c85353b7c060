"""What vLLM's factory asks this package for."""

import sys
from types import ModuleType

import pytest

import pdkv.adapters.vllm as package
from pdkv.errors import ConfigError


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "dev"])
def test_another_vllm_is_refused_by_its_version_and_not_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    other = ModuleType("vllm")  # has no module that the connector imports
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setattr(other, "__version__", version, raising=False)
    with pytest.raises(ConfigError, match=rf"version: '{version}'.*0\.32\.x"):
        _ = package.PdkvConnector


def test_nothing_else_is_in_it() -> None:
    with pytest.raises(AttributeError, match="NixlConnector"):
        _ = package.NixlConnector
