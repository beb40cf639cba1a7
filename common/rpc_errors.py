"""The one mapping between Entresol's errors and gRPC statuses, used on both sides.

A server sends the status code, the message for people, and in the trailing metadata what kind of error it is, with
operation and errno where a lower layer failed. A client turns that back into the same kind; a status that did not
come from Entresol (no such metadata: an unreachable server, a proxy) is mapped by its code. Text is never parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import grpc

from common import errors
from common.errors import EntresolError, LowerLayerError
from doca_shims.api import ShimError

KIND_KEY = "entresol-error-kind"
OPERATION_KEY = "entresol-error-operation"
ERRNO_KEY = "entresol-error-errno"

Metadata = tuple[tuple[str, str | bytes], ...]


_KINDS: dict[str, tuple[type[EntresolError], grpc.StatusCode]] = {
    "not-found": (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    "already-exists": (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    "permission-denied": (errors.PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    "precondition": (errors.PreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    "user": (errors.UserError, grpc.StatusCode.INVALID_ARGUMENT),
    "deadline": (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    "unavailable": (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    "lower-layer": (errors.LowerLayerError, grpc.StatusCode.ABORTED),
    "internal": (errors.InternalError, grpc.StatusCode.INTERNAL),
}
"""Subclasses stand before their bases: the first that fits is the kind."""

_CODES: dict[grpc.StatusCode, type[EntresolError]] = {
    **{code: kind for kind, code in reversed(_KINDS.values()) if kind is not LowerLayerError},
    grpc.StatusCode.ABORTED: errors.UnavailableError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.UnavailableError,
    grpc.StatusCode.OUT_OF_RANGE: errors.UserError,
    grpc.StatusCode.UNAUTHENTICATED: errors.PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UserError,
}


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str, Metadata]:
    """(code, message, trailing metadata) to answer with. An exception that is none of ours is an internal error;
    its text stays in the server's log."""
    if isinstance(error, ShimError):
        error = LowerLayerError(error.operation, error.errno or 0, error.detail)
    elif isinstance(error, OSError):
        error = LowerLayerError("system call", error.errno or 0, str(error.filename or ""))
    for name, (kind, code) in _KINDS.items():
        if isinstance(error, kind):
            metadata: Metadata = ((KIND_KEY, name),)
            if isinstance(error, LowerLayerError):
                metadata += ((OPERATION_KEY, error.operation), (ERRNO_KEY, str(error.errno)))
            return code, str(error), metadata
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has the details", ((KIND_KEY, "internal"),)


def from_status(code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, Any]] | None) -> EntresolError:
    """The error that a client raises for a failed call."""
    values = dict(metadata or ())
    kind = _KINDS.get(str(values.get(KIND_KEY, "")), (None, code))[0]
    if kind is LowerLayerError:
        errno_text = str(values.get(ERRNO_KEY, "0"))
        return _RemoteLowerLayerError(
            str(values.get(OPERATION_KEY, "")), int(errno_text) if errno_text.isdecimal() else 0, message
        )
    if kind is None:
        kind = _CODES.get(code, errors.InternalError)
        message = f"{message or 'no details'} ({code.name})"
    return kind(message)


def from_rpc_error(error: grpc.RpcError) -> EntresolError:
    """As `from_status`, for what grpc and grpc.aio raise."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return errors.InternalError(f"the call failed: {error}")
    metadata = cast("Iterable[tuple[str, Any]] | None", error.trailing_metadata())
    return from_status(error.code(), error.details() or "", metadata)


class _RemoteLowerLayerError(LowerLayerError):
    """A lower layer's failure on the other side, with the text that it was told with there."""

    def __init__(self, operation: str, errno: int, message: str) -> None:
        super().__init__(operation, errno)
        self.args = (message,)
