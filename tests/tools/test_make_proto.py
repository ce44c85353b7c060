"""The generated code is what the .proto files give, and the check would say so if it were not."""

from pathlib import Path

import pytest

from tools import make_proto


def test_the_committed_code_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_proto.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_a_missing_and_a_left_over_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in {
        fresh: {"a_pb2.py": "1", "b_pb2.pyi": "1", "c_pb2_grpc.py": "1"},
        committed: {"a_pb2.py": "1", "b_pb2.pyi": "2", "d_pb2.py": "1", "__init__.py": "kept"},
    }.items():
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    assert make_proto.stale(fresh, committed) == ["b_pb2.pyi", "c_pb2_grpc.py", "d_pb2.py"]


def test_another_generator_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_proto, "PINS", {"grpcio-tools": "0.0.1"})
    assert make_proto.main(["--check"]) == 2
    assert "pip install grpcio-tools==0.0.1" in capsys.readouterr().out
