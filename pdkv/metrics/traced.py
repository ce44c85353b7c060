"""What a trace is told of a request that has ended: its stages, and its account.

Guarantees: nothing is measured for it: stages are those of the metrics, times those of the request's own events; of a
request that failed before its first token, the stage that it came to is the last one. No token is among what is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdkv.metrics.ending import Ending
from pdkv.metrics.names import FIRST_STEP
from pdkv.node.messages import GenerateDone, PrefillDone
from pdkv.tracing.span import Attributes, Span

PREFIX = "pdkv."
"""Of a stage's span: pdkv.queue, pdkv.prefill, pdkv.exposed_transfer, pdkv.verify, pdkv.first_step."""


def tell(span: Span, ending: Ending, stages: Mapping[str, float]) -> None:
    """`stages`: seconds of each, one after the other from the request's beginning."""
    if not span.listening:
        return
    since_s = ending.began_s
    for stage, seconds in stages.items():
        span.past(f"{PREFIX}{stage}", since_s, since_s + seconds)
        since_s += seconds
    if ending.first_s is not None and ending.second_s is not None:
        span.past(f"{PREFIX}{FIRST_STEP}", ending.first_s, ending.second_s)
    span.note(told(ending))


def told(ending: Ending) -> Attributes:
    """By OpenTelemetry's names where it has some."""
    facts: dict[str, str | int | float] = {
        "pdkv.request": ending.request,
        "gen_ai.usage.input_tokens": ending.prompt_tokens,
    }
    done = ending.done
    if isinstance(done, PrefillDone):
        facts |= {"pdkv.pages": done.account.pages, "pdkv.pages.pulled_back": done.pages_pulled_back}
    elif isinstance(done, GenerateDone):
        shipment = done.shipment
        facts |= {
            "gen_ai.usage.output_tokens": done.output_tokens,
            "pdkv.finish_reason": done.finish_reason,
            "pdkv.pages": shipment.pages_total,
            "pdkv.pages.hit": shipment.pages_hit,
            "pdkv.pages.shipped": shipment.pages_shipped,
            "pdkv.retries": done.retries,
            "pdkv.recomputed_tokens": done.recomputed_tokens,
            "pdkv.preemptions": done.preemptions,
        }
    return facts
