"""What is counted of every request, wherever it is served.

Guarantees: an error is counted by the fields that it names, once each; a time is observed if there was one.
"""

from __future__ import annotations

from pdkv.errors import DigestMismatch, PdkvError
from pdkv.metrics.ending import Ending
from pdkv.metrics.names import FIRST_STEP, Metrics


def count(metrics: Metrics, ending: Ending) -> None:
    metrics.requests.labels(ending.outcome).inc()
    if ending.error is not None:
        refused(metrics, ending.error)
    if isinstance(ending.error, DigestMismatch):
        metrics.digest_failures.inc()


def count_answer(metrics: Metrics, ending: Ending) -> None:
    if ending.ttft_s is not None:
        metrics.ttft.observe(ending.ttft_s)
    if ending.first_step_s is not None:
        metrics.stages.labels(FIRST_STEP).observe(ending.first_step_s)


def refused(metrics: Metrics, error: PdkvError) -> None:
    """By field; a contract's fields are a closed list."""
    for difference in error.differences:
        metrics.refusals.labels(difference.field).inc()
