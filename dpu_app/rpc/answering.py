"""How every RPC of the DPU application answers: its result, or the gRPC status of what was raised."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from common import rpc_errors

Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_LOG = logging.getLogger(__name__)


def answering(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Makes an RPC's handler of an async method from request to response: errors become statuses
    (`common.rpc_errors`), bugs are logged."""

    @functools.wraps(method)
    async def answer(self: Service, request: Request, context: Context) -> Response:
        try:
            return await method(self, request)
        except Exception as error:  # noqa: BLE001 - the server survives a bug in one call
            failure = error
            code, message, metadata = rpc_errors.to_status(error)
            if code is grpc.StatusCode.INTERNAL:
                _LOG.exception("%s failed", method.__qualname__)
        await context.abort(code, message, metadata)
        raise failure  # `abort` does not return

    return answer
