"""What a process's metrics have counted, for its status.

Guarantees: the numbers are the metrics' own; nothing is counted a second time.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from pdkv.metrics.names import ABORTED, DONE, Metrics


def totals(metrics: Metrics) -> dict[str, int]:
    """Since the start, by name with the unit last."""
    requests = _by_label(metrics.requests)
    tokens = _by_label(metrics.tokens)
    ended = {name: requests.pop(outcome, 0) for name, outcome in (("done", DONE), ("aborted", ABORTED))}
    return {
        **{f"{name}_requests": count for name, count in ended.items()},
        "failed_requests": sum(requests.values()),
        "prompt_tokens": tokens.get("prompt", 0),
        "output_tokens": tokens.get("output", 0),
        "hit_pages": sum(_by_label(metrics.hits).values()),
        "refusals": sum(_by_label(metrics.refusals).values()),
        "digest_failures": sum(_by_label(metrics.digest_failures).values()),
    }


def _by_label(metric: Counter | Histogram) -> dict[str, int]:
    """A counter's values, or a histogram's sums; "" without a label."""
    samples = [sample for family in metric.collect() for sample in family.samples]
    return {
        "".join(sample.labels.values()): int(sample.value)
        for sample in samples
        if sample.name.endswith(("_total", "_sum"))
    }
