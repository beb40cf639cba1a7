"""Every kind of error comes out of the wire as it went in; foreign statuses are mapped by their code."""

from __future__ import annotations

import errno
import inspect

import grpc
import pytest

from common import errors, rpc_errors
from common.errors import EntresolError, LowerLayerError
from doca_shims.api import ShimError

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, EntresolError) and kind not in (EntresolError, LowerLayerError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_survives_the_wire(kind: type[EntresolError]) -> None:
    code, message, metadata = rpc_errors.to_status(kind("what happened"))
    back = rpc_errors.from_status(code, message, metadata)
    assert type(back) is kind
    assert str(back) == "what happened"


def test_a_lower_layers_failure_keeps_operation_and_errno() -> None:
    for error in (LowerLayerError("open", errno.ENOSPC, "/x"), ShimError(errno.ENOSPC, "open", "/x")):
        code, message, metadata = rpc_errors.to_status(error)
        back = rpc_errors.from_status(code, message, metadata)
        assert isinstance(back, LowerLayerError)
        assert (back.operation, back.errno) == ("open", errno.ENOSPC)
        assert str(back) == "open failed: No space left on device (/x)"


def test_a_system_calls_failure_is_a_lower_layers() -> None:
    try:
        open("/nonexistent/file")  # noqa: SIM115
    except OSError as error:
        code, message, metadata = rpc_errors.to_status(error)
    back = rpc_errors.from_status(code, message, metadata)
    assert isinstance(back, LowerLayerError)
    assert back.errno == errno.ENOENT
    assert "/nonexistent/file" in str(back)


def test_an_unexpected_exceptions_text_stays_on_the_server() -> None:
    code, message, metadata = rpc_errors.to_status(KeyError("secret"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert isinstance(rpc_errors.from_status(code, message, metadata), errors.InternalError)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_foreign_status_is_some_kind(code: grpc.StatusCode) -> None:
    error = rpc_errors.from_status(code, "from a proxy", None)
    assert code.name in str(error)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
        assert type(error) is errors.UnavailableError
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert type(error) is errors.DeadlineError


def test_damaged_metadata_is_survived() -> None:
    metadata = ((rpc_errors.KIND_KEY, "lower-layer"), (rpc_errors.ERRNO_KEY, "many"))
    error = rpc_errors.from_status(grpc.StatusCode.ABORTED, "m", metadata)
    assert isinstance(error, LowerLayerError)
    assert error.errno == 0
    error = rpc_errors.from_status(grpc.StatusCode.NOT_FOUND, "m", ((rpc_errors.KIND_KEY, "novel"),))
    assert type(error) is errors.NotFoundError
