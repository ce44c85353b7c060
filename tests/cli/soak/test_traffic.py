"""Asks come from the seed alone, and share prefixes."""

from __future__ import annotations

from itertools import islice

import numpy as np

from pdkv.cli.soak.traffic import BRANCHES, CHUNK_TOKENS, ROOTS, SoakAsk, Traffic, prompts
from pdkv.node.messages import FailurePolicy


def asks(seed: int, count: int) -> list[SoakAsk]:
    traffic = Traffic(seed)
    return list(islice(iter(traffic.next, None), count))


def test_one_seed_one_sequence() -> None:
    first, again, other = ([(a.prompt, a.abort_after, a.request.on_failure) for a in asks(s, 50)] for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_prompts_share_whole_pages_and_differ_after() -> None:
    found = prompts(0)
    assert len(found) == ROOTS * BRANCHES
    a, b = found[0].tokens, found[1].tokens
    together = min(len(a), len(b))
    same = int(np.argmax(np.append(a[:together] != b[:together], True)))
    assert 32 <= same < together


def test_every_policy_and_some_aborts() -> None:
    many = asks(0, 300)
    assert {a.request.on_failure for a in many} == set(FailurePolicy)
    assert 0 < sum(a.abort_after is not None for a in many) < 60
    assert len({a.request.request_id for a in many}) == 300


def test_a_probe_is_the_prompt_that_takes_least() -> None:
    traffic = Traffic(5)
    probe = traffic.probe()
    work = [len(p.tokens) // CHUNK_TOKENS + p.sampling.max_tokens for p in traffic.prompts]
    assert work[probe.prompt] == min(work)
    assert (probe.abort_after, probe.request.on_failure) == (None, FailurePolicy.RETRY)
    assert probe.request.request_id != traffic.probe().request.request_id
