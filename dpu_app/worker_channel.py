"""The channel between the supervisor and one region worker: JSON messages on a SOCK_SEQPACKET socketpair.

`SupervisorEnd` lives in the supervisor's asyncio loop: numbered calls with deadlines. `WorkerEnd` lives in the
worker's epoll loop and never blocks. The worker is started with the descriptor's number as `--channel-fd`; its first
message is ``{"event": "start", "config": {...}}`` (`dpu_app.config.WorkerConfig`). A closed channel means that the
other side is gone. Carries control only: no block, no capsule.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from common.errors import (
    DeadlineError,
    EntresolError,
    InternalError,
    LowerLayerError,
    UnavailableError,
    UserError,
)

Message: TypeAlias = dict[str, Any]

MESSAGE_BYTES_MAX = 65536
QUEUED_MESSAGES_MAX = 4096
"""Beyond this the other side is taken for dead."""
_PR_SET_PDEATHSIG = 1
_LOG = logging.getLogger(__name__)


class ChannelClosedError(UnavailableError):
    """The other side is gone."""


def encode(message: Message) -> bytes:
    """Raises InternalError for a message that is too large."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise InternalError(f"a message of {len(data)} bytes is too large for the worker channel")
    return data


def decode(data: bytes) -> Message:
    """Raises InternalError: only Entresol speaks on the channel, so anything else is our bug."""
    try:
        message = json.loads(data)
    except ValueError as error:
        raise InternalError("what came over the worker channel is not JSON") from error
    if not isinstance(message, dict):
        raise InternalError("what came over the worker channel is not a message")
    return message


def describe_error(error: BaseException) -> Message:
    """The `error` member of an answer."""
    if isinstance(error, UserError):
        return {"kind": "user", "message": str(error)}
    if isinstance(error, OSError):
        operation = str(getattr(error, "operation", "") or error.filename or "system call")
        return {"kind": "lower", "message": str(error), "operation": operation, "errno": error.errno or 0}
    if isinstance(error, LowerLayerError):
        return {"kind": "lower", "message": str(error), "operation": error.operation, "errno": error.errno}
    kind = "deadline" if isinstance(error, DeadlineError) else "internal"
    return {"kind": kind, "message": str(error) or type(error).__name__}


def error_from(description: Message) -> EntresolError:
    """The inverse of `describe_error`."""
    kind, message = description.get("kind"), str(description.get("message", ""))
    if kind == "user":
        return UserError(message)
    if kind == "lower":
        error = LowerLayerError(str(description.get("operation", "")), int(description.get("errno", 0)))
        error.args = (message,)
        return error
    return DeadlineError(message) if kind == "deadline" else InternalError(message)


class _Socket:
    """A non-blocking SEQPACKET socket with a bounded queue for what the other side has not taken yet."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._socket = channel
        self._queue: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._queue)

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError."""
        if len(self._queue) >= QUEUED_MESSAGES_MAX:
            raise ChannelClosedError(f"the other side has left {QUEUED_MESSAGES_MAX} messages unread")
        self._queue.append(encode(message))
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the other side takes it. Raises ChannelClosedError."""
        while self._queue:
            try:
                self._socket.send(self._queue[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._queue.clear()
                raise ChannelClosedError("the other side of the worker channel is gone") from error
            self._queue.popleft()

    def receive(self) -> list[Message]:
        """All messages that wait. Raises ChannelClosedError when there is none and there will be no more."""
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            if not data:
                if messages:
                    return messages  # the next call finds the end again
                raise ChannelClosedError("the other side of the worker channel is gone")
            messages.append(decode(data))

    def close(self) -> None:
        self._socket.close()


class WorkerEnd:
    """The worker's side. Wait on `fileno` for reading, and for writing while `wants_write`, then call `flush`."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = _Socket(channel)

    @classmethod
    def from_fd(cls, fd: int) -> WorkerEnd:
        """Takes over the inherited descriptor `--channel-fd`."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return self._socket.wants_write

    def recv(self) -> list[Message]:
        """The messages that wait, perhaps none: the start event, then requests with `id`, `method` and `params`.

        Raises ChannelClosedError when the supervisor is gone: the worker then closes cleanly and exits.
        """
        return self._socket.receive()

    def reply(self, request_id: int, result: Message | None = None) -> None:
        """Raises ChannelClosedError."""
        self._socket.send({"id": request_id, "result": result or {}})

    def reply_error(self, request_id: int, error: BaseException) -> None:
        """Raises ChannelClosedError."""
        self._socket.send({"id": request_id, "error": describe_error(error)})

    def event(self, name: str, **fields: Any) -> None:
        """Raises ChannelClosedError."""
        self._socket.send({"event": name, **fields})

    def failed(self, error: BaseException) -> None:
        """The event by which a worker says why it cannot serve its region. Raises ChannelClosedError."""
        self.event("failed", **describe_error(error))

    def flush(self) -> None:
        """Raises ChannelClosedError."""
        self._socket.flush()

    def close(self) -> None:
        self._socket.close()


class SupervisorEnd:
    """The supervisor's side, used from one running asyncio loop. `on_event` and `on_closed` are called from it;
    `on_closed` once, when the worker is gone, not after `close`."""

    def __init__(
        self, channel: socket.socket, on_event: Callable[[Message], None], on_closed: Callable[[], None]
    ) -> None:
        self._socket = _Socket(channel)
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._on_closed = on_closed
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._next_id = 1
        self._closed = False
        self._writing = False
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, config: Message) -> None:
        """The first message: what the worker is to serve. Raises ChannelClosedError."""
        self._send({"event": "start", "config": config})

    def call(self, method: str, params: Message, timeout_s: float) -> asyncio.Future[Message]:
        """Sends the request before it returns, so that calls reach the worker in the order they were made; await
        the result. Raises, when awaited, what the worker answered (UserError, LowerLayerError, InternalError),
        DeadlineError when no answer came in time, ChannelClosedError when the worker is gone."""
        request_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Message] = self._loop.create_future()
        try:
            self._send({"id": request_id, "method": method, "params": params})
        except EntresolError as error:
            answer.set_exception(error)
            return answer
        self._calls[request_id] = answer
        late = DeadlineError(f"the region worker did not answer {method} within {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, _fail, answer, late)

        def ended(_: asyncio.Future[Message]) -> None:
            timer.cancel()
            self._calls.pop(request_id, None)

        answer.add_done_callback(ended)
        return answer

    def close(self) -> None:
        """Idempotent. Calls under way end with ChannelClosedError."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for answer in self._calls.values():
            _fail(answer, ChannelClosedError("the region worker is gone"))

    def _send(self, message: Message) -> None:
        if self._closed:
            raise ChannelClosedError("the region worker is gone")
        self._socket.send(message)
        self._watch_writing()

    def _watch_writing(self) -> None:
        if self._socket.wants_write and not self._writing:
            self._loop.add_writer(self._socket.fileno(), self._writable)
        elif self._writing and not self._socket.wants_write:
            self._loop.remove_writer(self._socket.fileno())
        self._writing = self._socket.wants_write

    def _writable(self) -> None:
        try:
            self._socket.flush()
        except ChannelClosedError:
            self._lost()
        else:
            self._watch_writing()

    def _readable(self) -> None:
        try:
            messages = self._socket.receive()
        except ChannelClosedError:
            self._lost()
            return
        except InternalError:
            _LOG.exception("a region worker sent what is no message; its channel is closed")
            self._lost()
            return
        for message in messages:
            if "event" in message:
                self._on_event(message)
            else:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        answer = self._calls.get(message.get("id", 0))
        if answer is None or answer.done():
            return  # it came after its deadline
        if "error" in message:
            answer.set_exception(error_from(message["error"]))
        else:
            answer.set_result(message.get("result", {}))

    def _lost(self) -> None:
        if not self._closed:
            self.close()
            self._on_closed()


def _fail(answer: asyncio.Future[Message], error: EntresolError) -> None:
    if not answer.done():
        answer.set_exception(error)


def socketpair() -> tuple[socket.socket, socket.socket]:
    """(supervisor's, worker's). Both closed on exec; the worker's is passed by `pass_fds`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; called by a worker at its start
    with the pid that `--parent-pid` names, since the parent may be gone already. Linux only; elsewhere the closed
    channel alone tells."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise ChannelClosedError("the supervisor ended before its worker began")
