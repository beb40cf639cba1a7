"""Sessions end when they should and not before, and their end reaches every worker."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import (
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnavailableError,
    UserError,
)
from common.identity import UNKNOWN, NamespaceRecord
from dpu_app import sessions
from dpu_app.sessions import NamespaceGrant, Session, SessionTable, negotiate

TTL_S = 6.0


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def advance(self, duration_s: float) -> None:
        self.now_ns += int(duration_s * 1e9)


class Workers:
    """Keeps what the workers would know."""

    def __init__(self) -> None:
        self.open: dict[int, set[int]] = {}
        self.late = False
        self.broken = False

    async def open_session(self, session: Session) -> None:
        if self.broken:
            raise UnavailableError("no worker")
        self.open[session.session_id] = {grant.handle for grant in session.namespaces.values()}

    async def add_namespace(self, session: Session, grant: NamespaceGrant) -> None:
        self.open[session.session_id].add(grant.handle)

    async def close_session(self, session_id: int) -> None:
        self.open.pop(session_id, None)
        if self.late:
            raise DeadlineError("a worker is stopped")


RECORD = NamespaceRecord(
    tenant="acme",
    salt=b"",
    model_id="m",
    weights_revision="r1",
    lora_id="",
    lora_revision="",
    kv_dtype="bfloat16",
    quantisation="",
    layout="x",
    page_tokens=16,
    block_tokens=256,
    layers=32,
    kv_heads=8,
    head_size=128,
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    cp_rank=UNKNOWN,
    cp_size=UNKNOWN,
)


def record(tenant: str = "acme", model_id: str = "m") -> bytes:
    return dataclasses.replace(RECORD, tenant=tenant, model_id=model_id).to_bytes()


class World:
    def __init__(self, sessions_max: int = 8, tenants: frozenset[str] | None = None) -> None:
        self.clock = HandClock()
        self.workers = Workers()
        self.table = SessionTable(self.clock, self.workers, TTL_S, sessions_max, tenants)

    async def open(self, *records: bytes) -> Session:
        session, grants = await self.table.open("acme", "node-1", "0.1", records)
        assert len(grants) == len(records)
        return session

    async def pass_time(self, duration_s: float) -> int:
        """As the supervisor does: expiry is looked at several times a TTL."""
        ended, steps = 0, max(1, round(duration_s / (TTL_S / 8)))
        for _ in range(steps):
            self.clock.advance(duration_s / steps)
            ended += await self.table.expire()
        return ended


@pytest.fixture
def world() -> World:
    return World()


async def test_a_session_lives_while_it_is_renewed_and_ends_a_ttl_after(world: World) -> None:
    session = await world.open()
    for _ in range(10):
        assert await world.pass_time(TTL_S * 0.9) == 0
        world.table.keep_alive(session.session_id, session.token)
    assert await world.pass_time(TTL_S * 0.99) == 0
    assert session.session_id in world.workers.open
    assert await world.pass_time(TTL_S * 0.02) == 1
    assert world.workers.open == {}
    with pytest.raises(NotFoundError):
        world.table.keep_alive(session.session_id, session.token)


async def test_a_broken_connection_leaves_half_a_ttl_to_show_life(world: World) -> None:
    dead, alive = await world.open(), await world.open()
    world.table.connection_lost(dead.session_id, "reset")
    world.table.connection_lost(alive.session_id, "reset")
    assert await world.pass_time(TTL_S * 0.4) == 0
    world.table.keep_alive(alive.session_id, alive.token)
    assert await world.pass_time(TTL_S * 0.2) == 1
    assert [session.session_id for session in world.table.sessions] == [alive.session_id]
    world.table.connection_lost(12345, "of a session that is gone")


async def test_a_late_loss_never_lengthens_a_sessions_life(world: World) -> None:
    session = await world.open()
    await world.pass_time(TTL_S * 0.8)
    world.table.connection_lost(session.session_id, "reset")
    assert await world.pass_time(TTL_S * 0.25) == 1


async def test_time_in_which_this_process_was_stopped_does_not_count(world: World) -> None:
    session = await world.open()
    await world.pass_time(TTL_S * 0.5)
    world.clock.advance(TTL_S * 10)
    assert await world.table.expire() == 0
    world.table.keep_alive(session.session_id, session.token)
    assert await world.pass_time(TTL_S * 0.9) == 0
    assert await world.pass_time(TTL_S * 0.2) == 1


async def test_the_token_is_the_sessions_own(world: World) -> None:
    first, second = await world.open(), await world.open()
    assert len(first.token) == sessions.TOKEN_BYTES
    assert first.token != second.token
    for token in (second.token, b"", first.token[:-1]):
        with pytest.raises(PermissionDeniedError):
            world.table.keep_alive(first.session_id, token)
        with pytest.raises(PermissionDeniedError):
            await world.table.close(first.session_id, token)
        with pytest.raises(PermissionDeniedError):
            await world.table.add_namespace(first.session_id, token, record())
    assert len(world.workers.open) == 2


async def test_closing_twice_is_fine(world: World) -> None:
    session = await world.open()
    await world.table.close(session.session_id, session.token)
    await world.table.close(session.session_id, session.token)
    assert world.workers.open == {}
    assert world.table.sessions == ()


async def test_a_worker_that_is_late_is_said_but_the_session_has_ended(world: World) -> None:
    session, other = await world.open(), await world.open()
    world.workers.late = True
    with pytest.raises(DeadlineError):
        await world.table.close(session.session_id, session.token)
    assert [left.session_id for left in world.table.sessions] == [other.session_id]
    assert await world.pass_time(TTL_S * 1.1) == 1
    assert world.table.sessions == ()


async def test_a_session_that_cannot_be_opened_leaves_nothing(world: World) -> None:
    world.workers.broken = True
    with pytest.raises(UnavailableError):
        await world.open()
    assert world.table.sessions == ()


async def test_namespaces_get_handles_from_one_and_the_same_record_the_same(world: World) -> None:
    session = await world.open(record(model_id="a"), record(model_id="b"), record(model_id="a"))
    assert [grant.handle for grant in session.namespaces.values()] == [1, 2]
    again = await world.table.add_namespace(session.session_id, session.token, record(model_id="b"))
    more = await world.table.add_namespace(session.session_id, session.token, record(model_id="c"))
    assert (again.handle, more.handle) == (2, 3)
    assert more.digest == NamespaceRecord.from_bytes(record(model_id="c")).digest()
    assert world.workers.open[session.session_id] == {1, 2, 3}


async def test_another_tenants_record_is_refused(world: World) -> None:
    with pytest.raises(PermissionDeniedError, match="another tenant"):
        await world.open(record(), record(tenant="rival"))
    session = await world.open()
    with pytest.raises(PermissionDeniedError, match="another tenant"):
        await world.table.add_namespace(session.session_id, session.token, record(tenant="rival"))
    with pytest.raises(UserError):
        await world.table.add_namespace(session.session_id, session.token, b"not a record")
    assert world.workers.open == {session.session_id: set()}


async def test_namespaces_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "NAMESPACES_MAX", 2)
    session = await world.open(record(model_id="a"), record(model_id="b"))
    with pytest.raises(PreconditionError):
        await world.table.add_namespace(session.session_id, session.token, record(model_id="c"))
    await world.table.add_namespace(session.session_id, session.token, record(model_id="a"))


async def test_sessions_are_limited_and_room_comes_back(world: World) -> None:
    opened = [await world.open() for _ in range(8)]
    with pytest.raises(UnavailableError, match="as many as it may"):
        await world.open()
    await world.table.close(opened[0].session_id, opened[0].token)
    await world.open()


async def test_only_listed_tenants_are_served() -> None:
    world = World(tenants=frozenset({"acme"}))
    await world.open()
    with pytest.raises(PermissionDeniedError, match="'rival' is not served"):
        await world.table.open("rival", "", "", [])
    with pytest.raises(UserError):
        await world.table.open("", "", "", [])


async def test_going_down_ends_all_and_takes_no_more(world: World) -> None:
    for _ in range(3):
        await world.open()
    await world.table.close_all("shutdown")
    assert world.workers.open == {}
    with pytest.raises(UnavailableError, match="shutting down"):
        await world.open()


@pytest.mark.parametrize(
    ("client", "own", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((1, 9), (2, 5), 5), ((5, 5), (1, 5), 5)],
)
def test_the_highest_common_version_is_taken(client: tuple[int, int], own: tuple[int, int], version: int) -> None:
    assert negotiate(*client, *own) == version


def test_no_common_version_names_who_is_old() -> None:
    with pytest.raises(PreconditionError, match="upgrade the DPU"):
        negotiate(3, 4, 1, 2)
    with pytest.raises(PreconditionError, match="upgrade the agent"):
        negotiate(1, 1, 2, 2)
    for client in ((0, 0), (0, 1), (2, 1)):
        with pytest.raises(UserError):
            negotiate(*client, 1, 1)
