"""The few kinds of exception of the control path. The data path answers with `common.status.Status` instead.

`common.rpc_errors` is the one place that maps them to and from gRPC.
"""

from __future__ import annotations

import os


class EntresolError(Exception):
    """Base of all errors that Entresol raises on purpose; its text is meant for people."""

    exit_code = 1


class UserError(EntresolError):
    """The caller can fix it: the message says what is wrong and what to do."""

    exit_code = 2


class NotFoundError(UserError):
    """The named thing does not exist."""


class AlreadyExistsError(UserError):
    """The named thing exists already."""


class PermissionDeniedError(UserError):
    """The tenant, or the token shown, gives no right to this."""


class PreconditionError(UserError):
    """The request is sound, but things are not in a state to do it; the message says what to change."""


class UnavailableError(EntresolError):
    """The other side cannot be reached or is not ready; trying again later may help."""

    exit_code = 3


class DeadlineError(UnavailableError):
    """It did not happen in the time allowed."""


class LowerLayerError(EntresolError):
    """A lower layer failed: `operation` names the call, `errno` is its errno (0 if it has none)."""

    exit_code = 4

    def __init__(self, operation: str, errno: int, detail: str = "") -> None:
        text = f"{operation} failed"
        if errno:
            text += f": {os.strerror(errno)}"
        if detail:
            text += f" ({detail})"
        super().__init__(text)
        self.operation = operation
        self.errno = errno


class InternalError(EntresolError):
    """Our bug. Please report it, with the log."""

    exit_code = 70
