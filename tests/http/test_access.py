"""Who may ask, and how much at once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, KeyRefused, LimitReached, NotAuthorised
from pdkv.http.access import Access, ApiKeys
from pdkv.rpc.security import Gate

NAMED = {"subjectAltName": (("DNS", "app-1"), ("URI", "spiffe://fleet/app"), ("IP Address", "10.0.0.1"))}


def keys_in(folder: Path, text: str) -> ApiKeys:
    path = folder / "keys"
    path.write_text(text, "utf-8")
    return ApiKeys(path)


def let_in(access: Access, authorization: str = "", certificate: dict[str, Any] | None = None) -> None:
    with access.let_in({"Authorization": authorization}, certificate, "10.0.0.9"):
        pass


def test_a_key_of_the_file_and_no_other(tmp_path: Path) -> None:
    access = Access(Gate(), keys_in(tmp_path, "# ours\nalpha\n\n  beta \n"))
    for good in ("Bearer alpha", "bearer beta"):
        let_in(access, good)
    for bad in ("", "alpha", "Bearer", "Bearer alph", "Bearer # ours", "Basic alpha", "Bearer \u2603"):
        with pytest.raises(KeyRefused) as error:
            let_in(access, bad, NAMED)
        assert "alph" not in str(error.value)


def test_a_changed_file_counts_at_once_and_a_broken_one_never(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(Gate(), keys_in(tmp_path, "alpha"))
    (tmp_path / "keys").write_text("gamma\n", "utf-8")
    let_in(access, "Bearer gamma")
    with pytest.raises(KeyRefused):
        let_in(access, "Bearer alpha")
    (tmp_path / "keys").unlink()
    let_in(access, "Bearer gamma")
    assert "stay in use" in caplog.text


@pytest.mark.parametrize("text", ["", "# none\n", "\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="http_api_keys"):
        keys_in(tmp_path, text)


def test_under_mutual_tls_names_count() -> None:
    let_in(Access(Gate(), None), certificate=NAMED)
    for patterns in (("app-*",), ("spiffe://fleet/*",)):
        let_in(Access(Gate(allow_names=patterns), None), certificate=NAMED)
    with pytest.raises(NotAuthorised, match="app-1"):
        let_in(Access(Gate(allow_names=("other",)), None), certificate=NAMED)


def test_one_caller_has_so_many_at_once(tmp_path: Path) -> None:
    access = Access(Gate(calls_per_peer=2), None)
    with ExitStack() as running:
        for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
            running.enter_context(access.let_in({}, None, address))
        with pytest.raises(LimitReached):
            running.enter_context(access.let_in({}, None, "10.0.0.1"))
    with access.let_in({}, None, "10.0.0.1"):
        pass
