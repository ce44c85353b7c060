"""Two engines, each a worker side over memory of its own; gRPC between them, and reads in this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.adapters.vllm.loads import Loads
from pdkv.adapters.vllm.orders import Adapter
from pdkv.adapters.vllm.worker import Identity, Results, WorkerSide
from pdkv.contract import SEED_RULE
from pdkv.errors import ConfigError
from pdkv.ids import NodeId
from pdkv.kvcache.verifier import Verifier
from tests.adapters.vllm.engines import BLOCKS, TOKENS, engine_pool, layers, lora, pair, prompt
from tests.certificates import HERE, Authority


def test_a_prompt_goes_from_one_engines_blocks_into_anothers() -> None:
    with pair() as (p, d):
        words = prompt(3 * TOKENS + 5)
        p.hold("r", words, 4, 2, 9, 7)
        d.load("r", words, p, 11, 3, 12, 20)
        done = d.until(lambda r: r.received)
        assert (done.failed, done.bad_blocks) == (set(), set())
        for theirs, mine in zip((4, 2, 9, 7), (11, 3, 12, 20), strict=True):
            assert p.bytes_of(theirs) == d.bytes_of(mine)
        assert p.bytes_of(5) != d.bytes_of(5), "and nothing else"
        assert p.until(lambda r: r.sent).sent == {"r"}, "read, so the engine may have its blocks back"
        counts = d.side.tally.take()
        assert counts["pages_loaded"] == 4
        assert counts["bytes_loaded"] == 4 * len(p.bytes_of(1))
        assert 0 < counts["post_seconds"] < counts["load_seconds"]


def test_only_what_is_lacking_is_read() -> None:
    with pair() as (p, d):
        words = prompt(3 * TOKENS)
        before = d.bytes_of(11)
        p.hold("r", words, 4, 2, 9)
        d.load("r", words, p, 3, 12, first=1)
        d.until(lambda r: r.received)
        assert d.bytes_of(11) == before
        assert (p.bytes_of(2), p.bytes_of(9)) == (d.bytes_of(3), d.bytes_of(12))
        assert d.side.tally.take()["pages_loaded"] == 2


def test_a_prompt_that_is_asked_for_before_it_is_there_is_waited_for() -> None:
    with pair() as (p, d):
        words = prompt(TOKENS)
        d.load("r", words, p, 3)
        p.hold("r", words, 4)
        assert d.until(lambda r: r.received).failed == set()


def test_other_tokens_or_another_salt_are_another_prompt() -> None:
    with pair(find_s=0.2) as (p, d):
        p.hold("r", prompt(TOKENS), 4)
        before = d.bytes_of(3) + d.bytes_of(5)
        d.load("a", prompt(TOKENS, seed=1), p, 3)
        d.load("b", prompt(TOKENS, salt="x"), p, 5)
        done = d.until(lambda r: len(r.received) == 2)
        assert done.failed == {"a", "b"}
        assert done.bad_blocks == {3, 5}
        assert d.bytes_of(3) + d.bytes_of(5) == before


def test_a_request_that_wants_nothing_lets_the_other_engine_go_on() -> None:
    with pair() as (p, d):
        words = prompt(2 * TOKENS)
        p.hold("r", words, 4, 6)
        d.load("r", words, p, first=2)
        assert p.until(lambda r: r.sent).sent == {"r"}
        assert d.side.results().received == set(), "the engine doesn't wait for it"


def test_a_prompt_that_nobody_wants_is_let_go_in_time() -> None:
    with pair(hold_s=0.05, find_s=0.2) as (p, d):
        words = prompt(TOKENS)
        p.hold("r", words, 4)
        assert p.until(lambda r: r.sent).sent == {"r"}
        d.load("r", words, p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}


def test_contracts_that_differ_are_refused_by_field() -> None:
    with pair(change=lambda c: replace(c, weights_id="others")) as (p, d):
        words = prompt(TOKENS)
        p.hold("r", words, 4)
        before = d.bytes_of(3)
        d.load("r", words, p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}
        assert d.bytes_of(3) == before
        assert p.side.tally.take()["contract_mismatches"] == 1, "where it was found"
        assert d.side.tally.take()["loads_failed/ContractMismatch"] == 1


def test_in_shadow_mode_they_are_counted_and_go_through() -> None:
    with pair(shadow=True, change=lambda c: replace(c, weights_id="others")) as (p, d):
        words = prompt(TOKENS)
        p.hold("r", words, 4)
        d.load("r", words, p, 3)
        assert d.until(lambda r: r.received).failed == set()
        assert p.bytes_of(4) == d.bytes_of(3)
        assert p.side.tally.take()["contract_mismatches"] == d.side.tally.take()["contract_mismatches"] == 1


def test_one_that_is_not_in_shadow_mode_is_refused_by_one_that_is() -> None:
    with pair(shadow=True, change=lambda c: replace(c, seed_rule=SEED_RULE)) as (p, d):
        p.hold("r", prompt(TOKENS), 4)
        d.load("r", prompt(TOKENS), p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}


def test_blocks_that_no_engine_may_name_end_the_request_and_no_more() -> None:
    with pair() as (p, d):
        words = prompt(2 * TOKENS)
        p.hold("r", words, 0, 4)
        assert p.until(lambda r: r.sent).sent == {"r"}
        d.load("r", words, p, 3, BLOCKS)
        assert d.until(lambda r: r.received).failed == {"r"}
        p.hold("again", words, 5, 4)
        d.load("again", words, p, 3, 6)
        assert d.until(lambda r: r.received).failed == set()


def test_a_dead_engine_is_an_error_and_no_hang() -> None:
    with pair() as (p, d):
        words = prompt(TOKENS)
        p.side.close()
        d.load("r", words, p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}


def test_a_port_in_use_is_said_when_the_engine_starts() -> None:
    with pair() as (p, _):
        pool = engine_pool(layers(), BLOCKS, TOKENS)
        with pytest.raises(ConfigError, match="bind"):
            WorkerSide(p.settings, Identity(NodeId("q"), 0, p.side.contract), pool)


def test_what_comes_after_the_end_ends_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pair() as (p, d):
        words = prompt(2 * TOKENS)
        d.side.close()
        d.hold("h", words, 4, 2)
        d.load("l", words, p, 3, 5)
        d.load("nothing", words, p, first=2)
        ended = d.side.results()
        assert (ended.sent, ended.received, ended.failed, ended.bad_blocks) == ({"h"}, {"l"}, {"l"}, {3, 5})
        assert "has ended" in caplog.text
        p.hold("h", words, 4, 2)
        assert p.side.results().sent == set(), "one that lives holds it"


class StrangeError(Exception):
    """Of somebody who isn't pdkv."""


@pytest.mark.parametrize("step", ["seal", "verify"])
def test_whatever_goes_wrong_ends_the_request_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    def failing(self: Verifier, *args: object) -> object:
        raise StrangeError(f"in {step}")

    words, told = prompt(3 * TOKENS), list[set[str]]()
    with pair() as (p, d):
        note = p.side._node._note

        def noting(change: Callable[[Results], None]) -> None:
            change(alone := Results())
            told.append(alone.sent)
            note(change)

        monkeypatch.setattr(p.side._node, "_note", noting)
        with monkeypatch.context() as broken:
            broken.setattr(Verifier, step, failing)
            p.hold("r", words, 4, 2, 9)
            d.load("r", words, p, 11, 12, 13)
            done = d.until(lambda r: r.received)
        assert (done.received, done.failed, done.bad_blocks) == ({"r"}, {"r"}, {11, 12, 13})
        assert p.until(lambda r: r.sent).sent == {"r"}, "the engine has its blocks back"
        kind = {"seal": "StalePages", "verify": "IntegrityError"}[step]
        assert d.side.tally.take()[f"loads_failed/{kind}"] == 1
        by_name = [r for r in caplog.records if r.exc_info and f"StrangeError: in {step}" in r.message]
        assert len(by_name) == 1, "logged once, with where it was raised"
        p.hold("again", words, 4, 2, 9)
        d.load("again", words, p, 11, 12, 13)
        assert d.until(lambda r: r.received).failed == set()
        assert p.until(lambda r: r.sent).sent == {"again"}
        assert told == [{"r"}, {"again"}], "each once: the engine doesn't know it afterwards"


def test_an_error_between_the_steps_ends_the_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(self: Loads, *args: object) -> None:
        raise StrangeError

    with pair() as (p, d):
        monkeypatch.setattr(Loads, "_bring", failing)
        p.hold("r", prompt(TOKENS), 4)
        d.load("r", prompt(TOKENS), p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}
        assert p.until(lambda r: r.sent).sent == {"r"}, "its lease was released"


def test_two_adapters_share_no_pages_and_one_does_wherever_it_lies(tmp_path: Path) -> None:
    """Two engines: one name, and one or two contents."""
    with pair(find_s=0.2) as (p, d):
        here = prompt(TOKENS, adapter=lora(tmp_path / "p" / "name", b"one"))
        p.hold("r", here, 4)
        before = d.bytes_of(3)
        for request, other in (("other", lora(tmp_path / "d" / "name", b"two")), ("none", None)):
            d.load(request, prompt(TOKENS, adapter=other), p, 3)
            assert d.until(lambda r: r.received).bad_blocks == {3}
        assert d.bytes_of(3) == before
        d.load("same", prompt(TOKENS, adapter=lora(tmp_path / "elsewhere", b"one")), p, 3)
        assert d.until(lambda r: r.received).failed == set()
        assert d.bytes_of(3) == p.bytes_of(4)


def test_an_adapter_that_cant_be_read_ends_the_request_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pair() as (p, d):
        gone = prompt(TOKENS, adapter=Adapter(str(tmp_path / "gone"), ""))
        p.hold("r", gone, 4)
        d.load("r", gone, p, 3)
        assert d.until(lambda r: r.received).bad_blocks == {3}
        assert p.until(lambda r: r.sent).sent == {"r"}
        assert d.side.tally.take()["loads_failed/ConfigError"] == 1
        assert caplog.text.count("adapter_config.json") == 2


def test_under_mutual_tls_a_certificate_names_its_worker_or_is_refused_at_the_start(tmp_path: Path) -> None:
    def files(*names: str) -> dict[str, str]:
        made = Authority().files(tmp_path, *names, *HERE)
        return {"tls_ca": str(made.ca), "tls_certificate": str(made.certificate), "tls_key": str(made.key)}

    with pair(**files("p", "d")) as (p, d):
        p.hold("r", prompt(TOKENS), 4)
        d.load("r", prompt(TOKENS), p, 3)
        assert d.until(lambda r: r.received).failed == set()
    with pytest.raises(ConfigError, match=r"certificate.*d"), pair(**files("p")):
        pass
