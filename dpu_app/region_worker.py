"""One region's worker process as the supervisor sees it: started, watched, restarted with back-off, stopped.

Owns the process and its channel; knows what state the region is in and why. Never looks inside the region. Made by
`dpu_app.region_set`, in the supervisor's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import DeadlineError, EntresolError, UnavailableError
from doca_shims.api import Clock
from dpu_app import worker_channel
from dpu_app.config import WorkerConfig
from dpu_app.sessions import NamespaceGrant, Session
from dpu_app.worker_channel import Message, SupervisorEnd

CALL_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 15.0
"""A worker told to stop flushes for up to 10 s first."""
SILENCE_MAX_S = 30.0
"""A worker that answers nothing for so long hangs, and is killed and restarted."""
SILENCE_CHECK_S = 5.0
LAST_WORDS_S = 1.0
NAMESPACES_PER_MESSAGE = 256
WORKER_COMMAND = (sys.executable, "-m", "dpu_app.worker")
_LOG = logging.getLogger(__name__)


class RegionState(enum.Enum):
    STARTING = "starting"
    """The worker opens and recovers the region."""
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    """It cannot be opened, and trying again would not help until someone deals with the cause."""
    RESTARTING = "restarting"
    """The worker is gone; another is started after a back-off."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class BackOff:
    """Delays before restarts: doubling from `first_s` to `last_s`, and from the start again after a worker has
    served for `calm_s`."""

    first_s: float = 0.2
    last_s: float = 30.0
    calm_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """Before the restart after so many failures in a row (from 1)."""
        return float(min(self.last_s, self.first_s * 2 ** min(failures - 1, 32)))


@dataclass(frozen=True)
class RegionFacts:
    """What the worker said when it was ready."""

    address: str
    uuid: bytes
    slot_bytes: int
    slots: int
    capacity_bytes: int
    generation: int
    recovered: int
    recovery_s: float

    @classmethod
    def from_event(cls, event: Message) -> RegionFacts:
        return cls(
            address=str(event["address"]),
            uuid=bytes.fromhex(event["uuid"]),
            slot_bytes=int(event["slot_bytes"]),
            slots=int(event["slots"]),
            capacity_bytes=int(event["capacity_bytes"]),
            generation=int(event["generation"]),
            recovered=int(event.get("recovered", 0)),
            recovery_s=float(event.get("recovery_s", 0.0)),
        )


@dataclass(frozen=True)
class WorkerHooks:
    """What a worker needs of its surroundings."""

    sessions: Callable[[], Sequence[Session]]
    """Those open now."""
    changed: Callable[[RegionWorker], None]
    """State or facts are others than before."""
    connection_lost: Callable[[int, str], None]
    """(session id, reason): an agent's connection to this worker broke."""


class RegionWorker:
    """The worker of one region. `start` returns at once; `settled` waits for what came of it."""

    def __init__(
        self,
        config: WorkerConfig,
        clock: Clock,
        hooks: WorkerHooks,
        back_off: BackOff | None = None,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.config = config
        self.state = RegionState.STOPPED
        self.message = ""
        self.facts: RegionFacts | None = None
        """Of the worker that serves, or served last."""
        self.restarts = 0
        self._clock = clock
        self._hooks = hooks
        self._back_off = back_off or BackOff()
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._channel: SupervisorEnd | None = None
        self._runner: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._stopping = False
        self._attached = False
        """The worker is ready and knows all sessions."""
        self._failure: Message | None = None
        self._draining = False

    @property
    def name(self) -> str:
        return self.config.region.name

    @property
    def pid(self) -> int:
        """Of the worker process; 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    # ------------------------------------------------------------------------------------------------ lifetime

    def start(self, *, force_format: bool = False) -> None:
        """Start the worker. `force_format` empties the region first, this once."""
        if self._runner is not None:
            raise RuntimeError(f"the worker of region {self.name} runs already")
        self._stopping = False
        self._settled.clear()
        self._set_state(RegionState.STARTING)
        self._runner = asyncio.create_task(self._run(force_format), name=f"region {self.name}")

    async def settled(self, timeout_s: float) -> RegionState:
        """The state once it is serving, failed or restarting. Raises DeadlineError."""
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise DeadlineError(f"region {self.name} is not ready after {timeout_s:g} s") from error
        return self.state

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """End the worker: asked to, and killed when it does not within the time, or does not serve yet (it may be
        reading its slot table for long; nothing is lost). Whether it ended cleanly.

        Idempotent. No byte moves through this worker when it returns.
        """
        self._stopping = True
        clean = True
        process = self._process
        if process is not None and process.returncode is None and self._attached:
            clean = await self._ask_to_stop(process, timeout_s)
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None
        if self._process is not None and self._process.returncode is None:
            self._kill()
            await self._process.wait()
        self._release()
        self._draining = False
        self._set_state(RegionState.STOPPED)
        return clean

    async def _ask_to_stop(self, process: asyncio.subprocess.Process, timeout_s: float) -> bool:
        try:
            if self._channel is not None:
                with contextlib.suppress(worker_channel.ChannelClosedError):  # it ends: how, its exit code tells
                    await self._channel.call("stop", {}, timeout_s)
            return await asyncio.wait_for(process.wait(), timeout_s) == 0
        except (EntresolError, asyncio.TimeoutError, TimeoutError) as error:
            _LOG.warning("a region worker did not stop when asked", extra={**self._about(), "why": str(error)})
            return False

    async def _run(self, force_format: bool) -> None:
        failures = 0
        while not self._stopping:
            started_ns = self._clock.monotonic_ns()
            try:
                await self._serve_once(force_format and failures == 0)
            except OSError as error:
                self._failure = {"kind": "lower", "message": f"its worker could not be started: {error}"}
            finally:
                self._release()
            if self._stopping:
                return
            if self._clock.monotonic_ns() - started_ns > self._back_off.calm_s * 1e9:
                failures = 0
            failures += 1
            failure = self._failure or {"kind": "internal", "message": self._how_it_ended()}
            delay_s = self._back_off.delay_s(failures)
            if failure.get("kind") == "user":
                self._set_state(RegionState.FAILED, str(failure["message"]))
                return
            self._set_state(RegionState.RESTARTING, f"{failure['message']}; next try in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            self.restarts += 1
            self._set_state(RegionState.STARTING, self.message)

    async def _serve_once(self, force_format: bool) -> None:
        """One life of a worker process."""
        self._failure = None
        self._process = None
        ours, theirs = worker_channel.socketpair()
        with theirs:
            channel_closed = asyncio.Event()
            self._channel = SupervisorEnd(ours, self._on_event, channel_closed.set)
            arguments = ("--channel-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid()))
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to handle
            )
        config = self.config
        if force_format:
            config = dataclasses.replace(config, region=dataclasses.replace(config.region, format="force"))
        watcher = asyncio.create_task(self._watch())
        try:
            with contextlib.suppress(worker_channel.ChannelClosedError):
                self._channel.start(config.to_dict())
            await self._process.wait()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):  # hear what the worker said last
                await asyncio.wait_for(channel_closed.wait(), LAST_WORDS_S)
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            watcher.cancel()

    def _release(self) -> None:
        self._attached = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"its worker was killed by signal {-code}"
        return f"its worker ended with exit code {code}"

    async def _watch(self) -> None:
        """Kill a worker that hangs: its connections break, its agents reconnect to its successor."""
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            if not self._attached or self._channel is None:
                continue
            try:
                await self._channel.call("status", {}, SILENCE_MAX_S)
            except DeadlineError:
                _LOG.error("a region worker hangs and is killed", extra=self._about())
                self._kill()
            except EntresolError as error:
                _LOG.debug("no status", extra={**self._about(), "why": str(error)})

    # ------------------------------------------------------------------------------------------------- channel

    def _on_event(self, event: Message) -> None:
        try:
            self._handle(event)
        except (KeyError, TypeError, ValueError):
            _LOG.exception("a region worker sent an event that makes no sense and is killed", extra=self._about())
            self._kill()

    def _handle(self, event: Message) -> None:
        name = event["event"]
        if name == "ready":
            self.facts = RegionFacts.from_event(event)
            self._attach()
            self._set_state(RegionState.SERVING)
            if self._draining and self._channel is not None:  # it was before its worker died
                self._set_state(RegionState.DRAINING)
                self._channel.call("drain", {"timeout_s": 0.0}, CALL_TIMEOUT_S).add_done_callback(self._log_failed_call)
        elif name == "failed":
            self._failure = event
        elif name == "connection_lost":
            self._hooks.connection_lost(int(event["session_id"]), str(event.get("reason", "")))
        else:
            raise ValueError(f"unknown event {name!r}")

    def _attach(self) -> None:
        """Tell a worker that has become ready of all sessions. Calls keep their order, so what happens to a session
        from now on reaches it afterwards."""
        self._attached = True
        for session in self._hooks.sessions():
            for call in self._open_calls(session):
                call.add_done_callback(self._log_failed_call)

    def _log_failed_call(self, call: asyncio.Future[Message]) -> None:
        error = None if call.cancelled() else call.exception()
        if error is not None:
            _LOG.warning("a region worker did not do as it was told", extra={**self._about(), "why": str(error)})

    def _open_calls(self, session: Session) -> list[asyncio.Future[Message]]:
        if self._channel is None:
            return []
        grants = list(session.namespaces.values())
        opening = {
            "session_id": session.session_id,
            "token": session.token.hex(),
            "tenant": session.tenant,
            "namespaces": [_describe(grant) for grant in grants[:NAMESPACES_PER_MESSAGE]],
        }
        calls = [self._channel.call("session_open", opening, CALL_TIMEOUT_S)]
        for grant in grants[NAMESPACES_PER_MESSAGE:]:
            calls.append(self._namespace_call(self._channel, session.session_id, grant))
        return calls

    @staticmethod
    def _namespace_call(channel: SupervisorEnd, session_id: int, grant: NamespaceGrant) -> asyncio.Future[Message]:
        return channel.call("session_namespace", {"session_id": session_id, **_describe(grant)}, CALL_TIMEOUT_S)

    async def open_session(self, session: Session) -> None:
        """Nothing to do while the worker is not ready: it learns of the session when it is. Raises DeadlineError."""
        if self._attached:
            await self._through(*self._open_calls(session))

    async def add_namespace(self, session: Session, grant: NamespaceGrant) -> None:
        """As `open_session`."""
        if self._attached and self._channel is not None:
            await self._through(self._namespace_call(self._channel, session.session_id, grant))

    async def close_session(self, session_id: int) -> None:
        """When it returns, no byte can land through this worker. Raises DeadlineError."""
        if self._attached and self._channel is not None:
            await self._through(self._channel.call("session_close", {"session_id": session_id}, CALL_TIMEOUT_S))

    @staticmethod
    async def _through(*calls: asyncio.Future[Message]) -> None:
        """A worker that dies meanwhile has nothing open any more, and its successor is told anew."""
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, worker_channel.ChannelClosedError):
                raise outcome

    async def status(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, int]:
        """The region's counters by name. Raises UnavailableError."""
        if not self._attached or self._channel is None:
            raise UnavailableError(f"region {self.name} is {self.state.value}")
        answer: dict[str, Any] = await self._channel.call("status", {}, timeout_s)
        return {str(name): int(value) for name, value in answer.get("stats", {}).items()}

    async def pauses(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """How long its loop's turns were, as `turn_times.TurnTimes.report` tells it. Raises UnavailableError."""
        if not self._attached or self._channel is None:
            raise UnavailableError(f"region {self.name} is {self.state.value}")
        return await self._channel.call("pauses", {}, timeout_s)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new stores and flush. Raises DeadlineError, UnavailableError, what the worker raises."""
        if not self._attached or self._channel is None:
            raise UnavailableError(f"region {self.name} is {self.state.value}")
        self._draining = True
        self._set_state(RegionState.DRAINING)
        await self._channel.call("drain", {"timeout_s": timeout_s}, timeout_s + CALL_TIMEOUT_S)

    # --------------------------------------------------------------------------------------------------- state

    def _set_state(self, state: RegionState, message: str = "") -> None:
        if state in (RegionState.SERVING, RegionState.FAILED, RegionState.RESTARTING):
            self._settled.set()
        if (state, message) == (self.state, self.message):
            return
        self.state, self.message = state, message
        level = logging.WARNING if state in (RegionState.FAILED, RegionState.RESTARTING) else logging.INFO
        _LOG.log(level, "region %s", state.value, extra={**self._about(), **({"why": message} if message else {})})
        self._hooks.changed(self)

    def _about(self) -> dict[str, object]:
        return {"region": self.name, **({"worker_pid": self.pid} if self.pid else {})}


def _describe(grant: NamespaceGrant) -> Message:
    return {"handle": grant.handle, "digest": grant.digest.hex()}
