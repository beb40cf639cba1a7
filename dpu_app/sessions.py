"""Sessions: who may use this DPU now, until when, and with which namespaces.

Owns the session table and its time limits; the region workers own connections and memory, and are told through
`SessionPeers`. Called by `dpu_app.rpc.sessions` and by the supervisor's clock. Never does I/O itself.

A session ends by `close`, by not being renewed for the TTL, or, where a worker saw the agent's connection break, by
not being renewed within half the TTL from then. Ending means: every worker has closed its connections, so that no
byte lands in the agent's memory any more, and has given back what the session held.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import NotFoundError, PermissionDeniedError, PreconditionError, UnavailableError, UserError
from common.identity import NamespaceRecord
from doca_shims.api import Clock

TOKEN_BYTES = 16
NAMESPACES_MAX = 1024
"""In one session."""
TEXT_MAX = 1024
"""Characters of a tenant's, agent's or version's name."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamespaceGrant:
    """`handle` is what capsule entries carry, from 1; `digest` is computed here, never taken from the agent."""

    handle: int
    digest: bytes


@dataclass
class Session:
    """One agent, as one tenant. Times are of the monotonic clock."""

    session_id: int
    token: bytes
    tenant: str
    agent_name: str
    client_version: str
    opened_ns: int
    expires_ns: int
    namespaces: dict[bytes, NamespaceGrant] = field(default_factory=dict)
    """By digest."""

    def grant(self, digest: bytes) -> NamespaceGrant:
        """The grant of a namespace, the one it has or a new one. Raises PreconditionError above NAMESPACES_MAX."""
        known = self.namespaces.get(digest)
        if known is not None:
            return known
        if len(self.namespaces) >= NAMESPACES_MAX:
            raise PreconditionError(f"a session can have {NAMESPACES_MAX} namespaces; open another session")
        grant = self.namespaces[digest] = NamespaceGrant(len(self.namespaces) + 1, digest)
        return grant


class SessionPeers(Protocol):
    """The region workers, all of them at once. What a worker that is starting misses, it is told when it is ready."""

    async def open_session(self, session: Session) -> None: ...
    async def add_namespace(self, session: Session, grant: NamespaceGrant) -> None: ...
    async def close_session(self, session_id: int) -> None:
        """Returns when no byte can land in the agent's memory through any worker. Raises DeadlineError."""
        ...


def negotiate(client_min: int, client_max: int, own_min: int, own_max: int) -> int:
    """The highest version of both inclusive ranges. Raises UserError (not a range), PreconditionError (none)."""
    if client_min < 1 or client_max < client_min:
        raise UserError(f"wire versions {client_min} to {client_max} are not a range from 1 up")
    version = min(client_max, own_max)
    if version < max(client_min, own_min):
        older = "agent" if client_max < own_min else "DPU"
        raise PreconditionError(
            f"no wire version in common: the agent speaks {client_min} to {client_max}, this DPU {own_min} to "
            f"{own_max}; upgrade the {older}"
        )
    return version


class SessionTable:
    """All sessions of this DPU. `tenants` are the ones served; None serves any."""

    def __init__(
        self,
        clock: Clock,
        peers: SessionPeers,
        ttl_s: float,
        sessions_max: int,
        tenants: frozenset[str] | None = None,
    ) -> None:
        self._clock = clock
        self._peers = peers
        self._ttl_ns = int(ttl_s * 1e9)
        self._sessions_max = sessions_max
        self._tenants = tenants
        self._sessions: dict[int, Session] = {}
        self._checked_ns = clock.monotonic_ns()
        self.accepting = True
        """False while the DPU goes down: no new sessions."""

    @property
    def ttl_ms(self) -> int:
        return self._ttl_ns // 10**6

    @property
    def sessions(self) -> Sequence[Session]:
        """Those open now."""
        return tuple(self._sessions.values())

    def remaining_ns(self, session: Session) -> int:
        return max(0, session.expires_ns - self._clock.monotonic_ns())

    async def open(
        self, tenant: str, agent_name: str, client_version: str, records: Sequence[bytes]
    ) -> tuple[Session, list[NamespaceGrant]]:
        """A new session, known to every worker, and the grants of `records` (canonical namespace records) in order.

        Raises UserError (malformed), PermissionDeniedError, PreconditionError, UnavailableError (too many).
        """
        if not self.accepting:
            raise UnavailableError("this DPU is shutting down")
        self._check_tenant(tenant)
        for text in (tenant, agent_name, client_version):
            if len(text) > TEXT_MAX:
                raise UserError(f"a name of {len(text)} characters is too long: at most {TEXT_MAX}")
        if len(self._sessions) >= self._sessions_max:
            raise UnavailableError(f"this DPU has {self._sessions_max} sessions, as many as it may; try again later")
        now = self._clock.monotonic_ns()
        session = Session(
            self._new_id(),
            secrets.token_bytes(TOKEN_BYTES),
            tenant,
            agent_name,
            client_version,
            now,
            now + self._ttl_ns,
        )
        grants = [session.grant(self._digest(session, record)) for record in records]
        self._sessions[session.session_id] = session
        try:
            await self._peers.open_session(session)
        except BaseException:
            await self._end(session, "it could not be opened")
            raise
        _LOG.info("session opened", extra=_about(session))
        return session, grants

    def keep_alive(self, session_id: int, token: bytes) -> Session:
        """Raises NotFoundError, PermissionDeniedError."""
        session = self._authenticated(session_id, token)
        session.expires_ns = self._clock.monotonic_ns() + self._ttl_ns
        return session

    async def add_namespace(self, session_id: int, token: bytes, record: bytes) -> NamespaceGrant:
        """The grant that `record` has from now on, known to every worker. Registering it again gives the same.

        Raises NotFoundError, PermissionDeniedError, PreconditionError, UserError.
        """
        session = self._authenticated(session_id, token)
        grant = session.grant(self._digest(session, record))
        await self._peers.add_namespace(session, grant)
        return grant

    async def close(self, session_id: int, token: bytes) -> None:
        """When it returns, no byte can land in the agent's memory. A session that has ended already is fine.

        Raises PermissionDeniedError; DeadlineError when a worker did not answer (the session has ended all the same).
        """
        if session_id in self._sessions:
            await self._end(self._authenticated(session_id, token), "closed by the agent")
        else:
            await self._peers.close_session(session_id)

    def connection_lost(self, session_id: int, reason: str) -> None:
        """A worker saw the agent's connection break. An agent that lives reconnects and renews in time."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        deadline_ns = self._clock.monotonic_ns() + self._ttl_ns // 2
        session.expires_ns = min(session.expires_ns, deadline_ns)
        _LOG.info("session lost a connection", extra={**_about(session), "reason": reason})

    async def expire(self) -> int:
        """End the sessions whose time is up; how many. Started several times in each TTL, without waiting for the
        one before to return.

        Where it was not for longer (this process was stopped, or starved), that time is given to the sessions:
        nobody could have renewed in it.
        """
        now = self._clock.monotonic_ns()
        stalled_ns = now - self._checked_ns
        self._checked_ns = now
        if stalled_ns > self._ttl_ns // 2:
            _LOG.warning("sessions were not served for a while", extra={"stalled_ms": stalled_ns // 10**6})
            for session in self._sessions.values():
                session.expires_ns += stalled_ns
        due = [session for session in self._sessions.values() if session.expires_ns <= now]
        await self._end_all(due, "not renewed in time")
        return len(due)

    async def close_all(self, reason: str) -> None:
        """Ends every session and opens no more."""
        self.accepting = False
        await self._end_all(self.sessions, reason)

    async def _end_all(self, sessions: Sequence[Session], reason: str) -> None:
        endings = [self._end(session, reason) for session in sessions]
        for session, outcome in zip(sessions, await asyncio.gather(*endings, return_exceptions=True)):
            if isinstance(outcome, Exception):
                _LOG.warning("a worker is late in ending a session", extra={**_about(session), "why": str(outcome)})

    async def _end(self, session: Session, reason: str) -> None:
        if self._sessions.pop(session.session_id, None) is not None:
            _LOG.info("session ended", extra={**_about(session), "reason": reason})
        await self._peers.close_session(session.session_id)

    def _authenticated(self, session_id: int, token: bytes) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError("the session has ended; open another")
        if not hmac.compare_digest(session.token, token):
            raise PermissionDeniedError("the token is not this session's")
        return session

    def _check_tenant(self, tenant: str) -> None:
        if not tenant:
            raise UserError("a session needs a tenant")
        if self._tenants is not None and tenant not in self._tenants:
            raise PermissionDeniedError(f"tenant {tenant!r} is not served here")

    def _digest(self, session: Session, record: bytes) -> bytes:
        parsed = NamespaceRecord.from_bytes(record)
        if parsed.tenant != session.tenant:
            raise PermissionDeniedError("the namespace record names another tenant than the session's")
        return parsed.digest()

    def _new_id(self) -> int:
        while True:
            session_id = secrets.randbits(64)
            if session_id and session_id not in self._sessions:
                return session_id


def _about(session: Session) -> dict[str, str]:
    return {"session": f"{session.session_id:016x}", "agent": session.agent_name, "tenant": session.tenant}
