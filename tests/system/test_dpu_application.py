"""The DPU application as its users meet it: the installed command, real region workers, a real fabric connection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from common.status import Status
from common.wire import CONNECT_DATA
from doca_shims.api import Connection, ConnectionState, QueueLimits, ShimError
from doca_shims.registry import create_fabric
from dpu_app import report
from dpu_app.control_client import ControlClient
from host_agent.client import Client
from host_agent.config import NamespaceSettings

WAIT_S = 30.0
MODULE = (sys.executable, "-W", "error", "-m", "dpu_app.cli")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Application:
    """`entresol-dpu run` in its own process, and the command line to talk to it."""

    def __init__(self, directory: Path, regions: list[dict[str, Any]], **settings: Any) -> None:
        self.directory = directory
        self.state_dir = directory / "state"
        values = {
            "name": "dpu-s",
            "state_dir": "state",
            "fabric": {"name": "emu-shm", "listen": "{state_dir}/{region}.sock"},
            "regions": regions,
            **settings,
        }
        self.config = directory / "dpu.yaml"
        self.config.write_text(json.dumps(values))  # JSON is YAML
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.directory / "log").open("ab")
        with log:
            self.process = subprocess.Popen([*MODULE, "run", "--config", str(self.config)], stderr=log)
        wait_for(self._is_up, "the start of the application")

    def _is_up(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"the application ended:\n{(self.directory / 'log').read_text()}")
        with contextlib.suppress(FileNotFoundError, ValueError):
            run = json.loads((self.state_dir / "run.json").read_text())
            return bool(run["pid"] == self.process.pid)
        return False

    def command(self, *arguments: str, expect: int = 0) -> str:
        done = subprocess.run(
            [*MODULE, *arguments, "--state-dir", str(self.state_dir)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == expect, f"{arguments}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout if expect == 0 else done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "--json"))

    def region(self, name: str) -> dict[str, Any]:
        with ControlClient(self.address(), 10) as client:
            regions = report.status_values(client.status())["regions"]
        found: dict[str, Any] = next(item for item in regions if item["name"] == name)
        return found

    def wait_for_state(self, name: str, state: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            region = self.region(name)
            return region if region["state"] == state else None

        found: dict[str, Any] = wait_for(reached, f"region {name} {state}")
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process is None:
            raise RuntimeError("not started")
        self.process.send_signal(number)
        return self.process.wait(60)

    def address(self) -> str:
        return str(json.loads((self.state_dir / "run.json").read_text())["address"])


def region_values(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": f"{name}.flash", "capacity": "16MiB", "slot": "64KiB", "window": "2MiB", **more}


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for the path of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="ent") as name:
        yield Path(name)


@pytest.fixture
def make_application(directory: Path) -> Iterator[Callable[..., Application]]:
    made: list[Application] = []

    def make(*regions: dict[str, Any], **settings: Any) -> Application:
        application = Application(directory, list(regions), **settings)
        made.append(application)
        application.start()
        return application

    yield make
    for application in made:
        if application.process is not None and application.process.poll() is None:
            application.process.kill()
            application.process.wait(10)


def test_an_operators_day(make_application: Callable[..., Application], directory: Path) -> None:
    """Start, look, make a region, format it, drain, restart, delete it, stop."""
    application = make_application(region_values("r0"))
    r0 = application.wait_for_state("r0", "serving")
    assert r0["stats"]["SLOTS"] == r0["slots"] > 0
    [made] = application.json(
        "regions", "create", "r1", "--path", str(directory / "r1.flash"), "--capacity", "8MiB", "--slot", "16KiB",
        "--window", "1MiB", "--set", "eviction=sieve",
    )  # fmt: skip
    assert (made["state"], made["dynamic"]) == ("serving", True)
    assert made["uuid"] in application.command("regions", "format", "r1", expect=2)
    [formatted] = application.json("regions", "format", "r1", "--uuid", made["uuid"])
    assert formatted["uuid"] != made["uuid"]
    assert {region["state"] for region in application.json("drain", "--for", "10s")} == {"draining"}
    assert "dpu-s" in application.command("status")
    pauses = application.json("pauses")
    assert [item["region"] for item in pauses] == ["r0", "r1"]
    for item in pauses:  # every status was a turn of the worker's loop, and some part of it was spent on that
        assert sum(item["turns"]) == sum(item["own"]) > 2
        assert item["total_ns"]["control"] > 0
    workers = [region["worker_pid"] for region in application.json("status")["regions"]]
    assert application.stop() == 0
    assert not any(map(alive, workers))
    assert not (application.state_dir / "run.json").exists()

    application.start()
    assert application.wait_for_state("r1", "serving")["uuid"] == formatted["uuid"]
    assert application.wait_for_state("r0", "serving")["uuid"] == r0["uuid"]
    application.command("regions", "delete", "r0", "--yes", expect=2)
    application.command("regions", "delete", "r1", "--yes", "--erase")
    assert not (directory / "r1.flash").exists()
    assert application.stop(signal.SIGINT) == 0


def test_files_and_sockets_are_private(make_application: Callable[..., Application], directory: Path) -> None:
    application = make_application(region_values("r0"))
    application.wait_for_state("r0", "serving")
    assert stat.S_IMODE(application.state_dir.stat().st_mode) == 0o700
    for path in (*application.state_dir.rglob("*"), directory / "r0.flash"):
        assert not path.stat().st_mode & 0o077, path
    assert application.stop() == 0
    assert [path.name for path in application.state_dir.rglob("*.sock")] == []


def test_flash_that_is_not_ours_fails_alone_and_stays_as_it_is(
    make_application: Callable[..., Application], directory: Path
) -> None:
    foreign = os.urandom(16 << 20)
    (directory / "bad.flash").write_bytes(foreign)
    application = make_application(region_values("bad"), region_values("good"))
    application.wait_for_state("good", "serving")
    assert "superblock" in application.wait_for_state("bad", "failed")["message"]
    assert "did not write" in application.command("regions", "format", "bad", "--yes", expect=2)
    assert application.stop() == 0
    assert (directory / "bad.flash").read_bytes() == foreign


def test_a_region_keeps_the_slots_it_was_formatted_with(
    make_application: Callable[..., Application],
) -> None:
    """Its window must be cut into frames of the region's slot size, whatever the configuration says by now."""
    application = make_application(region_values("r1"))
    application.wait_for_state("r1", "serving")
    assert application.stop() == 0
    size = 64 << 10
    values = json.loads(application.config.read_text())
    values["regions"][0]["slot"] = "16KiB"
    application.config.write_text(json.dumps(values))
    application.start()
    application.wait_for_state("r1", "serving")
    keys = [bytes([number]) * 16 for number in range(8)]
    with Client([application.address()], tenant="demo", verify=False) as client:
        namespace = client.namespace(NamespaceSettings().record("demo"))
        pool = client.allocate(len(keys) * size)
        pool.array()[:] = np.repeat(np.arange(1, 9, dtype=np.uint8), size)
        expected = bytes(pool.view)
        stored = client.store(namespace, keys, pool.blocks(range(8), size))
        assert [result.status for result in stored] == [Status.OK] * 8
        pool.array()[:] = 0
        loaded = client.retrieve(namespace, keys, pool.blocks(range(8), size))
        assert [result.status for result in loaded] == [Status.OK] * 8
        assert bytes(pool.view) == expected


def test_workers_die_with_a_killed_application_and_the_next_one_serves(
    make_application: Callable[..., Application],
) -> None:
    application = make_application(region_values("r0"))
    before = application.wait_for_state("r0", "serving")
    application.stop(signal.SIGKILL)
    wait_for(lambda: not alive(before["worker_pid"]), "the worker's end", 5)
    assert "was killed" in application.command("status", expect=3)
    application.start()
    after = application.wait_for_state("r0", "serving")
    assert after["uuid"] == before["uuid"]
    assert after["generation"] > before["generation"]
    assert application.stop() == 0


class Agent:
    """The least of an agent: a session, and a fabric connection to one region."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = control_pb2_grpc.SessionsStub(self._channel)
        self.session = self.stub.OpenSession(
            control_pb2.OpenSessionRequest(agent_name="t", tenant="acme", wire_version_min=1, wire_version_max=1),
            timeout=10,
        )
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._channel.close)
        fabric_settings = self.session.regions[0].fabrics[0]
        self._address = fabric_settings.address
        self._fabric = create_fabric(fabric_settings.name, dict(fabric_settings.options))
        self._stack.callback(self._fabric.close)
        self._pd = self._fabric.alloc_pd()
        self._stack.callback(self._pd.close)

    def connect(self, token: bytes | None = None) -> Connection:
        private_data = CONNECT_DATA.pack(self.session.session_id, token or self.session.token)
        connection = self._fabric.connect(self._address, self._pd, QueueLimits(8, 8, 1), (), private_data)
        self._stack.callback(connection.close)
        return connection

    def keep_alive(self) -> None:
        self.stub.KeepAlive(
            control_pb2.KeepAliveRequest(session_id=self.session.session_id, token=self.session.token), timeout=10
        )

    def close_session(self) -> None:
        self.stub.CloseSession(
            control_pb2.CloseSessionRequest(session_id=self.session.session_id, token=self.session.token), timeout=10
        )

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def make_agent() -> Iterator[Callable[[Application], Agent]]:
    with contextlib.ExitStack() as stack:

        def make(application: Application) -> Agent:
            agent = Agent(application.address())
            stack.callback(agent.close)
            return agent

        yield make


def lost(connection: Connection) -> bool:
    connection.poll()
    return connection.state is ConnectionState.ERROR


def test_a_session_admits_its_agent_and_its_end_breaks_the_connection(
    make_application: Callable[..., Application], make_agent: Callable[[Application], Agent]
) -> None:
    application = make_application(region_values("r0"))
    application.wait_for_state("r0", "serving")
    agent = make_agent(application)
    with pytest.raises(ShimError, match="no such session"):
        agent.connect(bytes(16))
    connection = agent.connect()
    assert connection.state is ConnectionState.READY
    assert [session["tenant"] for session in application.json("status")["sessions"]] == ["acme"]
    agent.close_session()
    wait_for(lambda: lost(connection), "the connection's end", 5)
    with pytest.raises(ShimError, match="no such session"):
        agent.connect()
    assert application.stop() == 0


def test_a_silent_agent_loses_its_session_within_the_ttl(
    make_application: Callable[..., Application], make_agent: Callable[[Application], Agent]
) -> None:
    ttl_s = 2.0
    application = make_application(region_values("r0"), session_ttl="2s")
    application.wait_for_state("r0", "serving")
    agent = make_agent(application)
    connection = agent.connect()
    for _ in range(3):
        time.sleep(ttl_s / 3)
        agent.keep_alive()
    assert not lost(connection)
    silent_since_s = time.monotonic()
    wait_for(lambda: lost(connection), "the connection's end", 10)
    assert ttl_s * 0.5 < time.monotonic() - silent_since_s < ttl_s * 2
    with pytest.raises(grpc.RpcError):
        agent.keep_alive()
    assert application.stop() == 0


def test_an_agent_reconnects_with_its_session_to_a_restarted_worker(
    make_application: Callable[..., Application], make_agent: Callable[[Application], Agent]
) -> None:
    application = make_application(region_values("r0"), session_ttl="60s")
    region = application.wait_for_state("r0", "serving")
    agent = make_agent(application)
    connection = agent.connect()
    os.kill(region["worker_pid"], signal.SIGKILL)
    wait_for(lambda: lost(connection), "the connection's end", 5)
    wait_for(lambda: application.region("r0")["worker_restarts"] == 1, "the restart")
    application.wait_for_state("r0", "serving")
    assert agent.connect().state is ConnectionState.READY
    assert application.stop() == 0
