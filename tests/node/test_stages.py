"""A request passes the stages of its life in their order, and a hook that raises fails it there."""

from __future__ import annotations

from pdkv.ids import RequestId
from pdkv.node.stages import Stage, no_hook


def test_each_stage_is_named_after_its_node() -> None:
    assert {stage.partition(".")[0] for stage in Stage} == {"decode", "prefill"}


def test_without_a_hook_nothing_is_done() -> None:
    no_hook(Stage.ASKED, RequestId("r"))
