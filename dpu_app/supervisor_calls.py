"""What a region worker's supervisor asks of it, and what the worker tells it: drain, stop, and the calls it is given.

Owns the worker's end of the channel, the drains that wait for their answer, and when a stop gives up. Used by the
region server's loop, in whose epoll the channel is.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from common.errors import DeadlineError, UserError
from doca_shims.api import Clock, ShimError
from dpu_app.regions.engine import RegionEngine
from dpu_app.worker_channel import ChannelClosedError, Message, WorkerEnd

NS_PER_S = 1_000_000_000
STOP_DRAIN_S = 10.0
"""A stop without a drain before it flushes for at most so long."""
_LOG = logging.getLogger(__name__)

Methods: TypeAlias = Mapping[str, Callable[[dict[str, Any]], Message]]
"""By name; each is given the call's parameters and returns its answer, or raises UserError or ShimError."""


class SupervisorCalls:
    """`methods` are those beside "drain" and "stop". Registers the channel with `epoll`."""

    def __init__(
        self, channel: WorkerEnd, engine: RegionEngine, clock: Clock, epoll: select.epoll, methods: Methods
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._clock = clock
        self._epoll = epoll
        self._methods = methods
        self._drain_waiters: list[tuple[int, int]] = []  # request id, deadline
        self._stop_deadline_ns: int | None = None
        self._writing = False
        self.draining = False
        epoll.register(channel.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def stopped(self) -> bool:
        """Told to stop, and everything is on flash, or has had its time."""
        if self._stop_deadline_ns is None:
            return False
        return self._engine.drained or self._clock.monotonic_ns() >= self._stop_deadline_ns

    @property
    def busy(self) -> bool:
        """`serve` has something to do."""
        return bool(self._drain_waiters or self._writing or self._channel.wants_write)

    def tell(self, event: str, **fields: Any) -> None:
        try:
            self._channel.event(event, **fields)
        except ChannelClosedError:
            self._gone()

    def receive(self) -> None:
        """The channel is readable."""
        try:
            for message in self._channel.recv():
                self._answer(message)
        except ChannelClosedError:
            self._epoll.unregister(self._channel.fileno())
            self._writing = False
            self._gone()

    def serve(self) -> None:
        """Answer drains that are over, and send what could not be sent at once."""
        try:
            if self._drain_waiters:
                self._answer_drains()
            wants = self._channel.wants_write
            if wants != self._writing:
                self._writing = wants
                self._epoll.modify(self._channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if wants else 0))
            if wants:
                self._channel.flush()
        except ChannelClosedError:
            self._gone()

    def _gone(self) -> None:
        self._drain_waiters = []
        if self._stop_deadline_ns is None:
            _LOG.warning("the supervisor is gone; stopping")
            self._stop()

    def _answer(self, message: Message) -> None:
        request_id, method, params = int(message["id"]), str(message["method"]), message.get("params", {})
        if method == "drain":
            self.draining = True
            self._engine.drain()
            deadline_ns = self._clock.monotonic_ns() + int(float(params["timeout_s"]) * NS_PER_S)
            self._drain_waiters.append((request_id, deadline_ns))
            return
        if method == "stop":
            self._channel.reply(request_id)
            self._stop()
            return
        handler = self._methods.get(method)
        try:
            if handler is None:
                raise UserError(f"a region worker has no method {method!r}")
            self._channel.reply(request_id, handler(params))
        except (UserError, ShimError) as error:
            self._channel.reply_error(request_id, error)

    def _stop(self) -> None:
        self._engine.drain()
        self.draining = True
        self._stop_deadline_ns = self._clock.monotonic_ns() + int(STOP_DRAIN_S * NS_PER_S)

    def _answer_drains(self) -> None:
        now_ns = self._clock.monotonic_ns()
        left = []
        for request_id, deadline_ns in self._drain_waiters:
            if self._engine.drained:
                self._channel.reply(request_id)
            elif now_ns >= deadline_ns:
                self._channel.reply_error(request_id, DeadlineError("blocks are still on their way to flash"))
            else:
                left.append((request_id, deadline_ns))
        self._drain_waiters = left
