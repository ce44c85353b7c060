"""What is asked of a node or a router when somebody scrapes, and where they ask.

Guarantees: the status is taken in the node's own loop; a process whose loop doesn't answer within `ASK_S` shows what
was counted so far, and no gauges; the port is open only as long as the body runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from pdkv.errors import ConfigError
from pdkv.metrics import names
from pdkv.metrics.names import Metrics
from pdkv.metrics.port import serving
from pdkv.node.messages import NodeStatus
from pdkv.node.routing import RouterStatus
from pdkv.router.registry import UP

log = logging.getLogger(__name__)
ASK_S = 2.0
Value = tuple[tuple[str, ...], float]
NOWHERE: Mapping[str, int] = {}
"""Where nodes are looked for, of a process that looks for none."""


class StatusCollector:
    """Asks `status` in `loop`; for a registry, which calls it from another thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, families: Callable[[], Iterable[Metric]], ask_s: float = ASK_S
    ) -> None:
        self._loop = loop
        self._families = families
        self._ask_s = ask_s

    def collect(self) -> Iterator[Metric]:
        async def ask() -> list[Metric]:
            return list(self._families())

        asked = ask()
        try:
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # the loop has ended
            asked.close()
            return
        try:
            yield from future.result(self._ask_s)
        except (TimeoutError, CancelledError):
            future.cancel()
            log.warning("the node did not say how it is within %.3g s", self._ask_s)


def node_families(
    status: NodeStatus, *, evictable: int, locked: int, evicted: int, failing: Mapping[str, int] = NOWHERE
) -> Iterator[Metric]:
    """Of a prefill or a decode node; `failing` as its finder says it."""
    pages = {name: count for name, count in status.pages.items() if name != "total"}
    yield _gauge(names.NODE_PAGES, [((name,), count) for name, count in pages.items()])
    yield _gauge(names.CACHED_PAGES, [(("evictable",), evictable), (("locked",), locked)])
    yield _gauge(names.REQUESTS_RUNNING, [((), status.requests)])
    yield _gauge(names.QUEUED, [((), status.queued)])
    yield _gauge(names.WAITING_TOKENS, [((), status.waiting_tokens)])
    yield _gauge(names.AVAILABLE, [((), status.available_pages)])
    yield _gauge(names.LEASES, [((), status.leases)])
    states = Tally(peer.state for peer in status.peers.values())
    yield _gauge(names.PEERS, [((state,), states[state]) for state in ("CONNECTING", "READY", "SUSPECT", "LOST")])
    yield _gauge(names.UNSETTLED, [((), len(status.unsettled))])
    yield _gauge(names.QUARANTINES, [((), len(status.quarantine))])
    yield _gauge(names.READY, [((), not status.unready)])
    yield _gauge(names.DRAINING, [((), status.draining)])
    yield _gauge(
        names.WORKSPACE, [((n.removesuffix("_bytes"),), v) for n, v in status.workspace.items() if "bytes" in n]
    )
    yield _counter(names.FENCES, status.fences)
    yield _counter(names.PREEMPTIONS, status.preemptions)
    yield _counter(names.EVICTED, evicted)
    yield _gauge(names.DISCOVERY, [((of,), count) for of, count in failing.items()])
    facts = {
        "name": str(status.name),
        "role": status.role,
        "content": status.contract.content_fingerprint.hex()[:12],
        "backend": status.backend,
    }
    name, words, _ = names.INFO
    yield InfoMetricFamily(name, words, facts)


def router_families(status: RouterStatus, unready: str, failing: Mapping[str, int] = NOWHERE) -> Iterator[Metric]:
    known = {"prefill": status.prefill, "decode": status.decode}
    rows = [
        ((role, state), float(sum((said == UP) == (state == "up") for said in nodes.values())))
        for role, nodes in known.items()
        for state in ("up", "down")
    ]
    yield _gauge(names.NODES, rows)
    yield _gauge(names.APART, [((), len(status.apart))])
    yield _gauge(names.REQUESTS_RUNNING, [((), status.requests)])
    yield _gauge(names.QUEUED, [((), status.waiting)])
    yield _counters(names.CHOICES, status.choices)
    yield _counters(names.ESTIMATES, status.estimates)
    yield _counter(names.CHOOSING, status.choosing_s)
    yield _gauge(names.READY, [((), not unready)])
    yield _gauge(names.DISCOVERY, [((of,), count) for of, count in failing.items()])


@contextmanager
def exported(metrics: Metrics, families: Callable[[], Iterable[Metric]], bind: str) -> Iterator[int]:
    """Serve them over HTTP at `bind`, host:port; yields the port. To be entered in the loop that `families` is for.

    Raises `ConfigError` if the address can't be had.
    """
    host, _, port = bind.rpartition(":")
    metrics.registry.register(StatusCollector(asyncio.get_running_loop(), families))
    with ExitStack() as held:
        try:
            taken = held.enter_context(serving(metrics.registry, host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError("metrics_bind", bind, f"a free address of this machine ({error})") from error
        yield taken


def _gauge(metric: tuple[str, str, str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    name, words, labels = metric
    family = GaugeMetricFamily(name, words, labels=labels.split())
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def _counter(metric: tuple[str, str, str], value: float) -> Metric:
    name, words, _ = metric
    return CounterMetricFamily(name, words, value=value)


def _counters(metric: tuple[str, str, str], values: Mapping[str, float]) -> Metric:
    """One a value of its only label."""
    name, words, label = metric
    family = CounterMetricFamily(name, words, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family
