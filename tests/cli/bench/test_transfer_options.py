"""What is asked for on the command line is what is measured, or is refused with what it takes."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.cli.bench.cases import FULL, QUICK, Mode
from pdkv.cli.bench.transfer_options import BASELINES, TransferOptions
from pdkv.cli.bench.yardsticks import Kind
from pdkv.errors import ConfigError
from pdkv.rpc.security import PlainText


def test_what_is_given_takes_the_place_of_the_presets_values() -> None:
    options = TransferOptions(
        pages="512, 1,512",
        mode="streaming,warm",
        order="contiguous",
        placement="layer_major,page_major:layer_major",
        digests="off,on",
        chunk_pages="8",
        read_pages="0,4",
        peers="1,2",
        sinks="2",
        hit="0,0.5,1",
    )
    sweep = options.sweep()
    assert sweep.pages == (512, 1)
    assert sweep.mode == (Mode.STREAMING, Mode.WARM)
    assert sweep.scattered == (False,)
    assert sweep.placement == (("layer_major", "layer_major"), ("page_major", "layer_major"))
    assert sweep.digests == (False, True)
    assert (sweep.chunk_pages, sweep.read_pages, sweep.sources, sweep.sinks) == ((8,), (0, 4), (1, 2), (2,))
    assert sweep.hit == (0.0, 0.5, 1.0)


def test_presets() -> None:
    assert TransferOptions().sweep() == QUICK
    assert TransferOptions(full=True).sweep() == FULL
    assert TransferOptions(full=True).times() > TransferOptions().times() > 1
    assert TransferOptions(repetitions=1).times() == 1


def test_a_sink_pulls_from_no_more_sources_than_it_was_told_of() -> None:
    sink = TransferOptions(role="sink", connect="a:1,b:2", full=True)
    assert sink.sweep().sources == (1, 2)
    with pytest.raises(ConfigError, match="peers"):
        TransferOptions(role="sink", connect="a:1", peers="2").sweep()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pages", "0", "whole numbers from 1"),
        ("pages", "many", "whole numbers"),
        ("mode", "warm,hot", "any of warm, cold, streaming"),
        ("order", "random", "scattered, contiguous"),
        ("placement", "page_major:row_major", "page_major, layer_major"),
        ("digests", "yes", "on, off"),
        ("hit", "1.5", "numbers from 0 to 1"),
        ("hit", "nan", "numbers from 0 to 1"),
    ],
)
def test_a_list_that_can_not_be_read_is_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        TransferOptions(**{name: text}).sweep()
    assert refused.value.fields["field"] == name


def test_baselines_are_those_that_there_are() -> None:
    assert {Kind(name) for name in BASELINES} == set(Kind) - {Kind.NIXL_LARGEST}
    assert TransferOptions(baselines="all").kinds() == BASELINES
    assert TransferOptions(baselines="memcpy").kinds() == ("memcpy",)
    assert TransferOptions().kinds() == ()
    with pytest.raises(ConfigError, match="baselines"):
        TransferOptions(baselines="floppy").kinds()


@pytest.mark.parametrize(
    "options",
    [
        {"role": "middle"},
        {"role": "sink"},
        {"connect": "a:1"},
        {"raw_source": "a:1"},
        {"role": "sink", "connect": "a:1", "raw_bind": "a:1"},
        {"csv": "/nowhere/rows.csv"},
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TransferOptions(**options).check()


def test_plain_text_has_to_be_said_but_within_one_host() -> None:
    assert TransferOptions().secured() == PlainText()
    assert TransferOptions(role="source", insecure=True).secured() == PlainText()
    with pytest.raises(ConfigError, match="insecure"):
        TransferOptions(role="source").secured()
    with pytest.raises(ConfigError, match="role"):
        TransferOptions(tls_ca="ca.pem").secured()


def test_memory_is_a_share_of_what_is_free_unless_it_is_given() -> None:
    assert TransferOptions(memory="3GiB").memory_bytes() == 3 << 30
    assert 1 << 20 < TransferOptions().memory_bytes() < 1 << 50
