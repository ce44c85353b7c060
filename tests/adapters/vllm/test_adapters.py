"""Adapters by their content."""

import os
import shutil
from pathlib import Path

import pytest

from pdkv.adapters.vllm.adapters import FILES, Adapters
from pdkv.adapters.vllm.orders import Adapter
from pdkv.errors import ConfigError
from tests.adapters.vllm.engines import lora


def test_the_same_files_elsewhere_are_the_same_adapter_in_any_process(tmp_path: Path) -> None:
    one = lora(tmp_path / "a" / "x")
    other = Adapter(shutil.copytree(tmp_path / "a" / "x", tmp_path / "b"), one.taken_as)
    (tmp_path / "b" / "README.md").write_text("not read by vLLM")
    assert Adapters().key(one) == Adapters().key(other)


def test_whatever_differs_in_what_vllm_reads_is_another_adapter(tmp_path: Path) -> None:
    """One byte at the end as well, and how it is taken; names and paths are all alike."""
    made = [
        lora(tmp_path / "0" / "x", bytes(1 << 20)),
        lora(tmp_path / "1" / "x", bytes((1 << 20) - 1) + b"\1"),
        lora(tmp_path / "2" / "x", bytes((1 << 20) + 1)),
        lora(tmp_path / "3" / "x", bytes(1 << 20), '{"r": 8}'),
        lora(tmp_path / "4" / "x", bytes(1 << 20), file=FILES[2]),
        Adapter(str(tmp_path / "0" / "x"), "3d float32"),
        Adapter(str(tmp_path / "0" / "x"), "2d bfloat16"),
    ]
    known = Adapters()
    assert len({known.key(adapter) for adapter in made}) == len(made)


def test_files_that_have_changed_are_refused_and_those_that_have_not_stay(tmp_path: Path) -> None:
    known, adapter, other = Adapters(), lora(tmp_path / "a"), lora(tmp_path / "b")
    before = known.key(adapter)
    assert known.key(other) == before == known.key(adapter)
    lora(tmp_path / "a", b"changed")
    for _ in range(2):
        with pytest.raises(ConfigError, match="first used"):
            known.key(adapter)
    assert known.key(other) == before


def test_files_that_were_put_in_the_place_of_others_are_refused_also_with_their_length_and_time(
    tmp_path: Path,
) -> None:
    known, adapter = Adapters(), lora(tmp_path / "a")
    known.key(adapter)
    file = tmp_path / "a" / FILES[1]
    was = file.stat()
    (tmp_path / "new").write_bytes(b"WEIGHTS")
    (tmp_path / "new").replace(file)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(ConfigError, match="first used"):
        known.key(adapter)


@pytest.mark.parametrize("lacking", FILES[:2])
def test_a_directory_without_an_adapter_is_refused_by_name(tmp_path: Path, lacking: str) -> None:
    adapter = lora(tmp_path / "a")
    (tmp_path / "a" / lacking).unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json and weights"):
        Adapters().key(adapter)
    with pytest.raises(ConfigError, match="nowhere"):
        Adapters().key(Adapter(str(tmp_path / "nowhere"), ""))
