"""Four complaints of an operator, each explained from numbers. Pure."""

from pdkv.geometry.diagnose.finding import NOTHING_WRONG, Finding
from pdkv.geometry.diagnose.pool import PoolFacts, diagnose_pool
from pdkv.geometry.diagnose.refused import RefusedFacts, diagnose_refused
from pdkv.geometry.diagnose.step import StepFacts, diagnose_step
from pdkv.geometry.diagnose.ttft import TtftFacts, diagnose_ttft

__all__ = [
    "NOTHING_WRONG",
    "Finding",
    "PoolFacts",
    "RefusedFacts",
    "StepFacts",
    "TtftFacts",
    "diagnose_pool",
    "diagnose_refused",
    "diagnose_step",
    "diagnose_ttft",
]
