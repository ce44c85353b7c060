"""An HTTP front where one was asked for, and nothing of it where none was."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.fronting import front_of
from pdkv.config import RouterConfig
from pdkv.errors import ConfigError, MissingDependency
from pdkv.http.front import HttpFront
from pdkv.node.readiness import Readiness

SERVICE: Any = object()
ADDRESSES: dict[str, Any] = {"prefill_addresses": ("a:1",), "decode_addresses": ("b:1",), "insecure": True}


def made(**settings: Any) -> HttpFront | None:
    return front_of(RouterConfig(**ADDRESSES, **settings), SERVICE, Readiness())


def test_only_where_it_was_asked_for() -> None:
    assert made() is None
    assert isinstance(made(http_bind="127.0.0.1:0"), HttpFront)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    for field, value in (("http_tokenizer", str(tmp_path)), ("http_api_keys", str(tmp_path / "none"))):
        with pytest.raises(ConfigError, match=field):
            made(http_bind="127.0.0.1:0", **{field: value})


def test_an_address_that_is_taken_is_named() -> None:
    async def body() -> None:
        first, second = made(http_bind="127.0.0.1:0"), None
        assert first is not None
        address = await first.start()
        second = made(http_bind=address)
        assert second is not None
        with pytest.raises(ConfigError, match="http_bind"):
            await second.start()
        await first.stop(MissingDependency("a", "b"))

    asyncio.run(body())


def test_nothing_of_it_is_imported_without() -> None:
    imports = "import sys; import pdkv.cli.nodes, pdkv.cli.serve; "
    code = imports + "sys.exit(bool({'aiohttp', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "pdkv.http.front")
    monkeypatch.delitem(sys.modules, "pdkv.http.intake")
    with pytest.raises(MissingDependency, match="aiohttp"):
        made(http_bind="127.0.0.1:0")
