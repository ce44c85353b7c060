"""Errors of ours as OpenAI's clients expect them: a status, and an object that says what was wrong.

Guarantees: a client is blamed (4xx) for what its own request is wrong about, and for nothing that nodes did to each
other; what may be better soon says after how many seconds to come again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pdkv.errors import BodyTooLarge, LeaseExpired, NeverFits, PdkvError, SlowClient

STATUSES = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 503,
    "UNAVAILABLE": 503,
    "CANCELLED": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""By the name of the gRPC status; 500 for others."""
BY_CLASS: tuple[tuple[type[PdkvError], int], ...] = (
    (BodyTooLarge, 413),
    (NeverFits, 413),
    (SlowClient, 408),
    (LeaseExpired, 502),
)
BAD_GATEWAY = 502
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1
AGAIN = (429, 503)


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    body: bytes
    headers: dict[str, str]


def failure_of(error: PdkvError) -> Failure:
    status = status_of(error)
    headers = {"Content-Type": "application/json"}
    if status in AGAIN:
        headers["Retry-After"] = _seconds(error.fields.get("retry_after_s", ""))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Failure(status, json.dumps(error_object(error)).encode(), headers)


def status_of(error: PdkvError) -> int:
    """Of HTTP."""
    for kind, status in BY_CLASS:
        if isinstance(error, kind):
            return status
    status = STATUSES.get(error.status, 500)
    # One node refused another, or failed what it had taken on: nothing that the client can mend.
    between_nodes = "accepted_by" in error.fields or ("address" in error.fields and status in (403, 404))
    return BAD_GATEWAY if between_nodes and status < 500 and status not in AGAIN else status


def error_object(error: PdkvError) -> dict[str, object]:
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    field = error.fields.get("field")
    return {"error": {"message": str(error), "type": kind, "param": field, "code": error.kind}}


def _seconds(said: str) -> str:
    """As a header has it: whole seconds, at least one."""
    try:
        return str(max(RETRY_AFTER_S, min(round(float(said)), 3600)))
    except (ValueError, OverflowError):
        return str(RETRY_AFTER_S)
