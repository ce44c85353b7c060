"""`pdkv rank`: as the other serving commands, it says what it is, and plain text has to be asked for."""

import pytest

from pdkv.cli.app import run


def test_plain_text_must_be_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["rank", "--backend", "loopback", "--pool-pages", "4", "--threads", "1"])
    assert ended.value.code == 2
    assert "pdkv: ConfigError: insecure: not given; allowed: " in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["rank", "--help"])
    assert ended.value.code == 0
    assert "pdkv rank --" in capsys.readouterr().out
