"""What is counted of a request follows from how it ended."""

from __future__ import annotations

import pytest

from pdkv.errors import BadPage, ContractMismatch, Difference, DigestMismatch, PdkvError
from pdkv.ids import RequestId
from pdkv.metrics.counts import count, count_answer
from pdkv.metrics.ending import Ending
from pdkv.metrics.names import FIRST_STEP, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("error", "refused", "digests"),
    [
        (
            ContractMismatch(
                [Difference("page_tokens", "64", "32", "equal"), Difference("main_row", "fp8", "bf16", "equal")]
            ),
            2,
            0,
        ),
        (DigestMismatch("bytes of 1 page", bad=(BadPage(0, 3, "main"),)), 0, 1),
    ],
)
def test_an_error_counts_by_its_fields_and_as_damage_if_it_is_that(
    error: PdkvError, refused: int, digests: int
) -> None:
    metrics = Metrics()
    count(metrics, Ending(RequestId("r"), 9, outcome=error.kind, error=error))
    assert value(metrics, "pdkv_requests_total", outcome=error.kind) == 1
    assert value(metrics, "pdkv_requests_total", outcome="done") in (None, 0)
    fields = [value(metrics, "pdkv_refusals_total", field=d.field) for d in error.differences]
    assert fields == [1] * refused
    assert value(metrics, "pdkv_digest_failures_total") == digests


def test_times_are_observed_that_there_are() -> None:
    metrics = Metrics()
    count_answer(metrics, Ending(RequestId("none"), 9, began_s=10.0))
    count_answer(metrics, Ending(RequestId("one"), 9, began_s=10.0, first_s=10.5))
    count_answer(metrics, Ending(RequestId("two"), 9, began_s=10.0, first_s=11.0, second_s=11.25))
    assert value(metrics, "pdkv_ttft_seconds_count") == 2
    assert value(metrics, "pdkv_ttft_seconds_sum") == 1.5
    assert value(metrics, "pdkv_stage_seconds_count", stage=FIRST_STEP) == 1
    assert value(metrics, "pdkv_stage_seconds_sum", stage=FIRST_STEP) == 0.25
