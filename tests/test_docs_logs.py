"""docs/logs.md names what a prefill node, a decode node and a router really say of a request, and nothing else."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.errors import PeerLost
from pdkv.ids import RequestId
from pdkv.metrics.ending import Ending, answer_facts
from pdkv.metrics.served import MeteredPrefillNode
from pdkv.node.messages import GenerateDone, Shipment, Speculation
from tests.metrics.test_ending import lines
from tests.metrics.test_served import metered
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair

PAGE = Path(__file__).resolve().parents[1] / "docs" / "logs.md"


def said(caplog: pytest.LogCaptureFixture) -> set[str]:
    """By two nodes of a request that ends well, by one that fails, and of an answer with drafts."""

    async def body(pair: Pair) -> None:
        metered(pair)
        assert isinstance(pair.prefill, MeteredPrefillNode)
        await answers(pair.decode.generate(request(300)))

    with caplog.at_level(logging.INFO):
        run(body, make_pair())
        failed = Ending(RequestId("r"), 1, error=PeerLost("gone", address="a:1"))
        failed.say({})
        drafted = replace(failed, done=GenerateDone("stop", 1, Shipment(), (), Speculation()))
        drafted.say(answer_facts(drafted))
    return {name for line in lines(caplog) for name in line} - {"level"}


def test_each_fact_has_its_line_and_each_line_its_fact(caplog: pytest.LogCaptureFixture) -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == said(caplog)
