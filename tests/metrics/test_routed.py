"""A router's requests are counted once, and its status says where its nodes are looked for."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from pdkv.discovery.finder import Finder, source_by
from pdkv.errors import PdkvError
from pdkv.ids import RequestId
from pdkv.metrics.names import Metrics
from pdkv.metrics.routed import MeteredRouter
from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.router.registry import Registry


def router() -> MeteredRouter:
    made = MeteredRouter(Registry((), ()), None)  # type: ignore[arg-type]
    made.metrics = Metrics()
    return made


def test_a_request_that_nobody_can_serve_counts_as_its_error() -> None:
    made = router()

    async def body() -> str:
        asked = GenerateRequest(RequestId("r"), np.arange(65, dtype=np.uint32), Sampling(max_tokens=2))
        with pytest.raises(PdkvError) as raised:
            async with aclosing(made.generate(asked)) as events:
                await anext(events)
        return raised.value.kind

    kind = asyncio.run(body())
    assert made.metrics.registry.get_sample_value("pdkv_requests_total", {"outcome": kind}) == 1


def test_its_status_says_where_it_looks() -> None:
    made = router()
    assert made.status().discovery == {}
    made.finder = Finder({"prefill": ("dns:nodes.test:7000",)}, lambda role, addresses: None, source_by(""))
    assert list(made.status().discovery) == list(made.finder.status())
    assert "nodes.test" in str(made.status().discovery)
