"""One DPU, as this agent sees it: its session, kept alive and opened again, and the links to its regions.

Owns the control-plane calls and a thread that makes them; the data path never waits for it. A lost region or DPU is
tried again with back-off; what is sent to it meanwhile is answered DISCONNECTED. Registers memory anew with each
session. Used by the client only.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from common import rpc_errors, wire
from common.errors import EntresolError, NotFoundError, PermissionDeniedError, UnavailableError
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from doca_shims.api import Clock, Fabric, ShimError
from host_agent.backoff import NS_PER_S, Backoff
from host_agent.config import AgentSettings
from host_agent.connecting import connect
from host_agent.link import Poller, RegionLink
from host_agent.memory import MemoryTable
from host_agent.registration import Domain, Fabrics, Grants, add_all

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_KEEP_ALIVES_PER_TTL = 3
_STARTING_POLL_S = 0.2
"""How often the DPU is asked while a region of it starts or restarts."""
_COMING_STATES = (control_pb2.REGION_STATE_STARTING, control_pb2.REGION_STATE_RESTARTING)
_ABSENT_STATES = (control_pb2.REGION_STATE_FAILED, control_pb2.REGION_STATE_STOPPED)
"""Of regions that hold no blocks until somebody acts, so placement leaves them out."""


@dataclass(frozen=True)
class RegionFacts:
    """A region as placement needs it."""

    name: str
    uuid: bytes
    slot_bytes: int
    weight: float
    link: RegionLink


class _Region:
    def __init__(self, link: RegionLink, backoff: Backoff) -> None:
        self.link = link
        self.backoff = backoff
        self.info: Any = None
        """The newest `control_pb2.Region`."""
        self.facts: RegionFacts | None = None
        """What placement last knew; kept while the region's worker starts again and cannot say it."""
        self.connected_ns: int | None = None
        """Since when, as far as its loss was not noticed here yet."""


class _Open:
    """One open session and what belongs to it alone."""

    def __init__(self, answer: Any) -> None:
        self.session_id: int = answer.session_id
        self.token: bytes = answer.token
        self.ttl_s = answer.ttl_ms / 1000
        self.epoch: int = answer.regions_epoch
        self.dpu_name: str = answer.dpu.name
        self.renew_due_ns = 0
        self.unrenewed = False
        """Whether the last attempt failed, and was told."""
        self.handles: dict[bytes, int] = {}
        self.domains: dict[int, Domain] = {}
        """By identity of the fabric."""


class DpuSession:
    """`records` are the namespaces that a session is opened with, by digest; `changed` is called in any thread when
    `regions` did change. Start it, wait for `first_attempt`, close it."""

    def __init__(
        self,
        address: str,
        settings: AgentSettings,
        fabrics: Fabrics,
        memories: MemoryTable,
        records: Mapping[bytes, bytes],
        poller: Poller,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.first_attempt = threading.Event()
        """Set once the DPU was found not to answer, or none of its regions is starting and each was tried once."""
        self.error: EntresolError | None = UnavailableError(f"{address} was not reached yet")
        """Why there is no session now."""
        self.regions: tuple[RegionFacts, ...] = ()
        self._settings = settings
        self._fabrics = fabrics
        self._memories = memories
        self._records = records
        self._poller = poller
        self._clock = clock
        self._changed = changed
        self._rng = random.Random()
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._stub = control_pb2_grpc.SessionsStub(self._channel)
        self._lock = threading.Lock()
        """Guards `_open` and registration: between this thread and callers that register."""
        self._open: _Open | None = None
        self._by_name: dict[str, _Region] = {}
        self._backoff = Backoff(settings.reconnect, self._rng)
        self._wake = threading.Event()
        self._suspect = False
        """A connection was lost: ask first whether the session still stands."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"entresol-session {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def fabric(self) -> Fabric | None:
        """A fabric that it uses."""
        with self._lock:
            domains = list(self._open.domains.values()) if self._open else []
        return domains[0].fabric if domains else None

    def add_memory(self, memory: Any) -> None:
        """Register with the session that is open now. Raises LowerLayerError."""
        with self._lock:
            domains = list(self._open.domains.values()) if self._open else []
            for domain in domains:
                domain.add(memory)

    def remove_memory(self, memory: Any) -> None:
        with self._lock:
            domains = list(self._open.domains.values()) if self._open else []
            for domain in domains:
                domain.remove(memory)

    def add_namespace(self, digest: bytes, record: bytes) -> None:
        """Tell the DPU, if a session is open. Raises UserError where the DPU refuses; what cannot be reached is told
        when it comes back."""
        with self._lock:
            session = self._open
        if session is None or digest in session.handles:
            return
        request = control_pb2.RegisterNamespaceRequest(
            session_id=session.session_id, token=session.token, record=record
        )
        try:
            answer = self._call(self._stub.RegisterNamespace, request)
        except NotFoundError:
            self._lost()
            return
        except UnavailableError as error:
            log.warning("a DPU did not take a namespace yet", extra={"dpu": self.address, "error": str(error)})
            self._lost()
            return
        session.handles[digest] = answer.namespace.handle

    def close(self) -> None:
        """End the session: connections first, so that nothing lands any more, then the DPU is told."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        session = self._drop("closed")
        if session is not None:
            request = control_pb2.CloseSessionRequest(session_id=session.session_id, token=session.token)
            try:
                self._call(self._stub.CloseSession, request)
            except EntresolError as error:  # it expires by itself
                log.info("a DPU was not told of the end", extra={"dpu": self.address, "error": str(error)})
        self._channel.close()

    # ------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                wait_s = self._step()
            except Exception:  # the agent's only way back to this DPU
                log.exception("keeping a session failed", extra={"dpu": self.address})
                wait_s = self._settings.reconnect.pause_max_s
            if self._open is None or not self._any_coming():
                self.first_attempt.set()
            self._wake.wait(wait_s)
            self._wake.clear()

    def _step(self) -> float | None:
        """Do what is due; seconds until something is due again, None for never."""
        for region in self._by_name.values():
            region.link.probe()  # a loss that no caller has met yet is noticed here
        now_ns = self._clock.monotonic_ns()
        session = self._open
        if session is None:
            if self._backoff.is_due(now_ns):
                session = self._open_session()
        elif self._suspect or session.renew_due_ns <= now_ns:
            session = self._renew(session)
        if session is not None:
            self._connect_regions(session)
        due_ns = [self._backoff.due_ns] if session is None else [session.renew_due_ns]
        if session is not None:
            due_ns += [r.backoff.due_ns for r in self._by_name.values() if not r.link.up and _connectable(r.info)]
            if self._suspect:
                return 0.0
        times = [due for due in due_ns if due is not None]
        return max(0.0, (min(times) - self._clock.monotonic_ns()) / NS_PER_S) if times else None

    def _open_session(self) -> _Open | None:
        digests = list(self._records)
        request = control_pb2.OpenSessionRequest(
            agent_name=self._settings.name or f"{socket.gethostname()}/pid {os.getpid()}",
            tenant=self._settings.tenant,
            client_version=client_version(),
            wire_version_min=wire.VERSION,
            wire_version_max=wire.VERSION,
            namespaces=[self._records[digest] for digest in digests],
        )
        try:
            answer = self._call(self._stub.OpenSession, request)
        except EntresolError as error:
            if type(error) is not type(self.error):
                log.warning("no session with a DPU", extra={"dpu": self.address, "error": str(error)})
            self.error = error
            self._backoff.failed(self._clock.monotonic_ns())
            return None
        session = _Open(answer)
        for digest, grant in zip(digests, answer.namespaces):
            session.handles[digest] = grant.handle
        with self._lock:
            self._open = session
            self._suspect = False
        self.error = None
        self._backoff.succeeded()
        self._take_regions(answer.regions, session.dpu_name or self.address)
        session.renew_due_ns = self._clock.monotonic_ns() + self._renewal_period_ns(session)
        for digest in [digest for digest in list(self._records) if digest not in session.handles]:
            self.add_namespace(digest, self._records[digest])  # opened by the client meanwhile
        return session

    def _renew(self, session: _Open) -> _Open | None:
        self._suspect = False
        request = control_pb2.KeepAliveRequest(
            session_id=session.session_id, token=session.token, regions_epoch=session.epoch
        )
        period_ns = self._renewal_period_ns(session)
        try:
            answer = self._call(self._stub.KeepAlive, request)
        except (NotFoundError, PermissionDeniedError) as error:
            log.info("the session has ended", extra={"dpu": self.address, "reason": str(error)})
            self._drop("the session has ended")
            return self._open_session()
        except EntresolError as error:
            level = logging.DEBUG if session.unrenewed else logging.WARNING
            log.log(level, "a session could not be renewed", extra={"dpu": self.address, "error": str(error)})
            session.unrenewed = True
            session.renew_due_ns = self._clock.monotonic_ns() + period_ns // 2
            return session
        session.unrenewed = False
        if answer.regions_epoch != session.epoch:
            session.epoch = answer.regions_epoch
            self._take_regions(answer.regions, session.dpu_name or self.address)
        session.renew_due_ns = self._clock.monotonic_ns() + self._renewal_period_ns(session)
        for digest in [digest for digest in list(self._records) if digest not in session.handles]:
            self.add_namespace(digest, self._records[digest])
        return session

    def _any_coming(self) -> bool:
        return any(region.info.state in _COMING_STATES for region in self._by_name.values())

    def _renewal_period_ns(self, session: _Open) -> int:
        period_s = session.ttl_s / _KEEP_ALIVES_PER_TTL
        return int((min(period_s, _STARTING_POLL_S) if self._any_coming() else period_s) * NS_PER_S)

    def _take_regions(self, infos: Sequence[Any], dpu_name: str) -> None:
        names = {info.name for info in infos}
        for name in [name for name in self._by_name if name not in names]:
            self._by_name.pop(name).link.close("the region was removed")
        for info in infos:
            region = self._by_name.get(info.name)
            if region is None:
                link = RegionLink(f"{dpu_name}/{info.name}", self._poller, self._clock, self._lost)
                region = self._by_name[info.name] = _Region(link, Backoff(self._settings.reconnect, self._rng))
            elif list(region.info.fabrics) != list(info.fabrics) or region.info.state != info.state:
                region.backoff.succeeded()  # news: try at once
            region.info = info
            if info.uuid:
                region.facts = RegionFacts(info.name, info.uuid, info.slot_bytes, info.weight, region.link)
        regions = [self._by_name[info.name] for info in infos if info.state not in _ABSENT_STATES]
        facts = tuple(region.facts for region in regions if region.facts is not None)
        if facts != self.regions:
            self.regions = facts
            self._changed()

    def _connect_regions(self, session: _Open) -> None:
        for region in self._by_name.values():
            if self._stopping or region.link.up or not _connectable(region.info):
                continue
            now_ns = self._clock.monotonic_ns()
            if region.connected_ns is not None:
                lasted_s = (now_ns - region.connected_ns) / NS_PER_S
                region.connected_ns = None
                if lasted_s >= self._settings.reconnect.pause_max_s:
                    region.backoff.succeeded()
                else:  # accepted and lost at once, again and again, is no success
                    region.backoff.failed(now_ns)
            if session.renew_due_ns <= now_ns:
                return  # renewing comes before waiting for regions that do not answer
            if not region.backoff.is_due(now_ns):
                continue
            try:
                self._connect(session, region)
                region.connected_ns = self._clock.monotonic_ns()
            except (EntresolError, ShimError) as error:
                region.link.down_reason = str(error)
                region.backoff.failed(self._clock.monotonic_ns())
                log.info("a region was not reached", extra={"region": region.link.name, "error": str(error)})

    def _connect(self, session: _Open, region: _Region) -> None:
        """Over the first of the region's fabrics that works. Raises what the last one failed with."""
        failure: EntresolError | ShimError = UnavailableError(f"{region.link.name} offers no fabric that is used here")
        for endpoint in _preferred(region.info.fabrics, self._settings.fabrics):
            try:
                domain = self._domain(session, self._fabrics.get(endpoint.name, endpoint.options))
                connect(
                    region.link,
                    region.info,
                    Grants(domain, session.handles),
                    endpoint.address,
                    wire.CONNECT_DATA.pack(session.session_id, session.token),
                    self._settings.capsules_in_flight,
                    min(self._settings.control_timeout_s, session.ttl_s / _KEEP_ALIVES_PER_TTL),
                )
                return
            except (EntresolError, ShimError) as error:
                failure = error
        raise failure

    def _domain(self, session: _Open, fabric: Any) -> Domain:
        with self._lock:
            domain = session.domains.get(id(fabric))
            if domain is None:
                domain = session.domains[id(fabric)] = Domain(fabric)
            add_all(domain, self._memories.all())
            return domain

    def _lost(self) -> None:
        self._suspect = True
        self._wake.set()

    def _drop(self, reason: str) -> _Open | None:
        """Close every connection and all that belongs to the session; the regions stay in the map."""
        with self._lock:
            session, self._open = self._open, None
        if session is None:
            return None
        for region in self._by_name.values():
            region.link.close(reason)
            region.connected_ns = None
            region.backoff.succeeded()
        for domain in session.domains.values():
            domain.close()
        self.error = UnavailableError(f"{self.address}: {reason}")
        return session

    def _call(self, method: Any, request: Any) -> Any:
        """Raises the kinds of `common.errors`."""
        try:
            return method(request, timeout=self._settings.control_timeout_s)
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error) from error


def _connectable(info: Any) -> bool:
    return info.state in (control_pb2.REGION_STATE_SERVING, control_pb2.REGION_STATE_DRAINING)


def _preferred(endpoints: Sequence[Any], order: Sequence[str]) -> list[Any]:
    if not order:
        return list(endpoints)
    return sorted((e for e in endpoints if e.name in order), key=lambda endpoint: order.index(endpoint.name))


def client_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("entresol")
    except PackageNotFoundError:
        return "unknown"
