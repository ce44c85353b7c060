"""Metrics of a serving process: always counted, served where an address was given."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from typing import Any

import pytest

from pdkv.cli.export import exporting_node, exporting_router
from pdkv.config import DecodeConfig, RouterConfig
from pdkv.errors import ConfigError
from pdkv.metrics.routed import MeteredRouter
from pdkv.node.readiness import Readiness
from pdkv.router.registry import Registry
from tests.node.scene import run
from tests.node.toy import Pair, make_pair


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_without_an_address_nothing_is_served_and_all_is_counted() -> None:
    async def body(pair: Pair) -> None:
        node: Any = pair.decode
        before = threading.active_count()
        with exporting_node(DecodeConfig(node_id="d0"), node):
            assert threading.active_count() == before
            node.metrics.requests.labels("done").inc()

    run(body, make_pair())


def test_a_nodes_pages_are_seen() -> None:
    async def body(pair: Pair) -> None:
        node: Any = pair.decode
        port = free_port()
        with exporting_node(DecodeConfig(node_id="d0", metrics_bind=f"127.0.0.1:{port}"), node):
            text = await asyncio.to_thread(page, port)
        total = node.status().pages["total"]
        assert f'pdkv_pages{{class="free"}} {float(total)}' in text
        assert 'role="decode"' in text

    run(body, make_pair())


def test_a_router_that_is_not_ready_says_so() -> None:
    async def body() -> None:
        readiness, port = Readiness(), free_port()
        readiness.say("nodes", "no node answers")
        router = MeteredRouter(Registry(("a:1",), ("b:1",)), None)  # type: ignore[arg-type]
        config = RouterConfig(
            node_id="r0", prefill_addresses=("a:1",), decode_addresses=("b:1",), metrics_bind=f"127.0.0.1:{port}"
        )
        with exporting_router(config, router, readiness):
            assert "pdkv_ready 0.0" in await asyncio.to_thread(page, port)

    asyncio.run(body())


def test_an_address_that_is_taken() -> None:
    async def body(pair: Pair) -> None:
        node: Any = pair.decode
        with socket.create_server(("127.0.0.1", 0)) as taken:
            bind = f"127.0.0.1:{taken.getsockname()[1]}"
            with (
                pytest.raises(ConfigError, match="metrics_bind"),
                exporting_node(DecodeConfig(node_id="d0", metrics_bind=bind), node),
            ):
                pass

    run(body, make_pair())
