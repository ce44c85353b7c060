"""Gives a serving process its metrics, and the port where they are asked for, if one was configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import disable_created_metrics
from prometheus_client.core import Metric

from pdkv.config import NodeConfig, RouterConfig, ServiceConfig
from pdkv.metrics.names import Metrics
from pdkv.metrics.scrape import NOWHERE, exported, node_families, router_families
from pdkv.node.readiness import Readiness
from pdkv.tracing.span import tracer

if TYPE_CHECKING:
    from pdkv.metrics.routed import MeteredRouter
    from pdkv.metrics.served import MeteredDecodeNode, MeteredPrefillNode

log = logging.getLogger(__name__)


@contextmanager
def exporting_node(config: NodeConfig, node: MeteredPrefillNode | MeteredDecodeNode) -> Iterator[None]:
    """Raises `ConfigError` for an address that can't be had."""
    from pdkv.metrics.served import MeteredDecodeNode  # it has tensors, and a router, which exports too, has none

    manager = node.parts.manager
    finder = node.finder if isinstance(node, MeteredDecodeNode) else None

    def families() -> Iterable[Metric]:
        tree = manager.tree
        return node_families(
            node.status(),
            evictable=tree.evictable,
            locked=tree.locked,
            evicted=manager.evicted_pages,
            failing=finder.failing() if finder else NOWHERE,
        )

    node.metrics = Metrics()
    with _exporting(config, node.metrics, families):
        yield


@contextmanager
def exporting_router(config: RouterConfig, router: MeteredRouter, readiness: Readiness) -> Iterator[None]:
    router.metrics = Metrics()
    finder = router.finder

    def families() -> Iterable[Metric]:
        return router_families(router.status(), readiness.unready, finder.failing() if finder else NOWHERE)

    with _exporting(config, router.metrics, families):
        yield


@contextmanager
def _exporting(config: ServiceConfig, metrics: Metrics, families: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    if tracing := tracer():
        tracing.lost = metrics.lost_spans.inc
    if not config.metrics_bind:
        yield
        return
    # a series more for each, which nobody reads
    disable_created_metrics()  # type: ignore[no-untyped-call]
    with exported(metrics, families, config.metrics_bind) as port:
        log.info("metrics at port %d", port)
        yield
