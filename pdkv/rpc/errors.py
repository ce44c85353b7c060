"""PdkvError on one side, gRPC status on the other, and back.

Guarantees: an error that pdkv raised arrives as the same class with the same words, fields and differences, over any
number of hops; a status that pdkv didn't make becomes the class of its kind, or `RemoteError` with code and words;
what is sent always fits the metadata limit. "Mine" in a difference stays the side that reported it.
"""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from pdkv import errors
from pdkv.errors import (
    ContractMismatch,
    DeadlineExceeded,
    Difference,
    PdkvError,
    PeerLost,
    RemoteError,
    TlsRefused,
)
from pdkv.v1 import common_pb2

MAX_METADATA_BYTES = 128 << 10
MAX_DETAIL_BYTES = 32 << 10
"""Base64 makes it a third longer; the message stands beside it once more."""
MAX_MESSAGE = 2048
MAX_PARTS = 64
"""Fields, and differences, of one error."""
TEXT_LIMITS = (2048, 512, 96)

KINDS: dict[str, type[PdkvError]] = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, PdkvError)
}
BARE: dict[grpc.StatusCode, type[PdkvError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: PeerLost,
}
"""Statuses that gRPC itself makes. It cancels, at a server that ends, the calls that have come and were not begun: they
may be made anew elsewhere. What this side cancels never ends with a status."""
RETRY_AFTER = "retry_after_s"
"""Field of an error that says when to come again: clients of other makes find it as google.rpc.RetryInfo too."""
_NOT_CONNECTED = "failed to connect to all addresses"
_HUNG_UP = re.compile("Socket closed|Connection reset|Broken pipe")


def status_of(error: PdkvError) -> grpc.Status:
    """The rich status that ends a call with `error`."""
    detail = _detail(error)
    details = [_packed(detail), *map(_packed, _retry_info(error))]
    code = grpc.StatusCode[error.status].value[0]
    return rpc_status.to_status(status_pb2.Status(code=code, message=detail.message, details=details))


def _retry_info(error: PdkvError) -> list[RetryInfo]:
    """None of what isn't a time: the field may have come from another process."""
    try:
        return [RetryInfo(retry_delay=timedelta(seconds=float(error.fields[RETRY_AFTER])))]
    except (KeyError, ValueError, OverflowError):
        return []


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def error_from(failure: grpc.aio.AioRpcError, *, address: str, what: str, tls: bool = True) -> PdkvError:
    """The error that a call to `address` ended with. Its `address` field names the node that it comes from: over
    several hops, the last one of them. `tls`: the call was made under TLS, which may be what it failed of.
    """
    detail = _received(failure)
    if detail is None:
        if why := _tls_words(failure):
            refused = TlsRefused if tls else PeerLost
            return refused(f"{what} at {address}: {why}", address=address, code=failure.code().name)
        kind = BARE.get(failure.code(), RemoteError)
        words = f"{what} at {address}: {failure.code().name}: {failure.details()}"
        return kind(words, address=address, code=failure.code().name)
    error = _rebuilt(detail, failure.code().name)
    error.fields = {"address": address, **error.fields}
    return error


def _tls_words(failure: grpc.aio.AioRpcError) -> str:
    """What a connection failed of, if that was TLS; "" if it wasn't. gRPC tells such statuses apart by words only."""
    said = failure.details() or ""
    if failure.code() is not grpc.StatusCode.UNAVAILABLE or _NOT_CONNECTED not in said:
        return ""
    if "Hostname Verification Check failed" in said:
        return "its certificate is of our CA, but has no name for who was dialled: make one with that DNS name or IP"
    if "WRONG_VERSION_NUMBER" in said:
        return "it speaks plain text, and this side TLS"
    if "handshake failed" in said:
        return f"its certificate is refused: look at its tls_certificate, and at tls_ca here ({said})"
    if _HUNG_UP.search(said):
        return (
            "it hangs up on connecting. Does it want TLS, or plain text? Under TLS it refuses this side's certificate:"
            " look at tls_certificate here, and at tls_ca there; or it has as many connections as it may have"
        )
    return ""


def _detail(error: PdkvError) -> common_pb2.ErrorDetail:
    """With texts cut shorter and shorter until it fits."""
    for limit in TEXT_LIMITS:
        detail = common_pb2.ErrorDetail(
            kind=error.kind if error.kind in KINDS else "PdkvError",
            message=_cut(str(error), min(limit, MAX_MESSAGE)),
            fields={_cut(k, limit): _cut(v, limit) for k, v in list(error.fields.items())[:MAX_PARTS]},
            differences=[
                common_pb2.Difference(
                    field=_cut(d.field, limit), mine=_cut(d.mine, limit), theirs=_cut(d.theirs, limit), rule=d.rule
                )
                for d in error.differences[:MAX_PARTS]
            ],
        )
        if detail.ByteSize() <= MAX_DETAIL_BYTES:
            break
    return detail


def _cut(text: str, limit: int) -> str:
    """Also makes it sendable: gRPC's details are text of one line."""
    line = text.encode("utf-8", "replace").decode().replace("\n", " ").strip()
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _received(failure: grpc.aio.AioRpcError) -> common_pb2.ErrorDetail | None:
    """pdkv's detail, if the status has a whole one."""
    detail = common_pb2.ErrorDetail()
    try:
        status = rpc_status.from_call(cast(grpc.Call, failure))
        found = status is not None and any(packed.Unpack(detail) for packed in status.details)
    except (ValueError, DecodeError):
        return None
    return detail if found else None


def _rebuilt(detail: common_pb2.ErrorDetail, code: str) -> PdkvError:
    """Classes have constructors of their own, so this one fills what all have in common."""
    kind = KINDS.get(detail.kind, RemoteError)
    error: PdkvError
    if issubclass(kind, ContractMismatch):
        error = kind([Difference(d.field, d.mine, d.theirs, d.rule) for d in detail.differences])
    else:
        error = kind.__new__(kind)
        PdkvError.__init__(error, detail.message)
    error.fields = dict(detail.fields)
    if detail.kind not in KINDS:
        error.fields = {"code": code, "kind": detail.kind, **error.fields}
    return error
