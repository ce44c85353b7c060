"""`pdkv soak` itself: what becomes of a run that is interrupted, and of a report."""

from __future__ import annotations

import pytest

import pdkv.cli.soak as package
from pdkv.cli.app import run


@pytest.mark.parametrize(("failure", "code"), [(KeyboardInterrupt, 130), (None, 1)])
def test_it_ends_with_a_code(
    failure: type[BaseException] | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def shown(settings: object, *, to_stderr: bool) -> package.SoakReport:
        from pdkv.cli.soak.report import SoakReport

        if failure:
            raise failure
        return SoakReport(seed=1)

    monkeypatch.setattr(package, "_shown", shown)
    with pytest.raises(SystemExit) as ended:
        run(["soak", "--minutes", "1"])
    assert ended.value.code == code
    assert ("interrupted" in capsys.readouterr().err) is bool(failure)
