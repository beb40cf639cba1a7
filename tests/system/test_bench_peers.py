"""The comparison with peers: the driver's protocol and every way in which a peer can fail, with a small store for a
peer; and Redis itself where redis-server is installed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import LowerLayerError
from emulator.peers import everyone, redis
from emulator.peers.catalogue import (
    FLASH_READ,
    LOOKUP,
    ON_FLASH,
    RETRIEVE,
    SAME_HOST,
    STAGED,
    STORE,
    Family,
    Peer,
    Sizes,
)
from emulator.peers.run import Peers, PeersSettings
from emulator.peers.turns import Turn

HERE = Family("here")
FAKE = str(Path(__file__).with_name("peer_adapters"))
SIZE = 64 << 10


def fake(fault: str = "", **options: Any) -> Peer:
    def start(_turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        return {"fault": fault}

    return Peer(
        name=f"fake {fault}",
        family=HERE,
        reach=SAME_HOST,
        adapter=FAKE,
        start=start,
        settings="",
        operations=STAGED | ON_FLASH | {LOOKUP},
        **options,
    )


@pytest.fixture
def settings(tmp_path: Path) -> PeersSettings:
    return PeersSettings(
        venvs=tmp_path / "venvs",
        flash_dir=Path(os.environ.get("ENTRESOL_TEST_FLASH_DIR", tmp_path / "flash")),
        blocks={SIZE: 8},
        batches=(1, 4),
        flash_batches=(4,),
        lookup_keys=16,
        lookup_calls=3,
        rounds=2,
        limit_s=60.0,
    )


@pytest.fixture
def run_peers(settings: PeersSettings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Peers, list[str]]]:
    def run(*peers: Peer, **changes: Any) -> tuple[Peers, list[str]]:
        told: list[str] = []
        run = Peers(peers, dataclasses.replace(settings, **changes), told.append)
        monkeypatch.setattr(run.limits, "read", lambda *_what: None)
        run.run()
        return run, told

    return run


def test_every_operation_is_measured_once_a_round(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    run, _ = run_peers(fake())
    (outcome,) = run.outcomes
    assert (outcome.error, outcome.wrong, outcome.version) == ("", [], "1.0")
    cells = outcome.cells
    assert {(operation, batch) for operation, _size, batch in cells} >= {(STORE, 1), (RETRIEVE, 4), (FLASH_READ, 4)}
    assert all(len(cell.gb_per_s or cell.keys_per_s) == 2 for cell in cells.values())
    assert cells[RETRIEVE, SIZE, 4].moved_bytes == 2 * 8 * SIZE
    assert len(cells[RETRIEVE, SIZE, 4].calls_us) == 2 * 2
    assert cells[RETRIEVE, SIZE, 1].client_cpu_s > 0


def test_every_other_round_goes_from_last_to_first(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    first, second = fake(), dataclasses.replace(fake(), name="other")
    _, told = run_peers(first, second)
    order = [text.partition(": ")[2] for text in told]
    assert order == ["limits of the machine", "fake ", "other", "other", "fake ", "limits of the machine"]


@pytest.mark.parametrize("fault", ["flip", "idle"])
def test_wrong_bytes_are_found(run_peers: Callable[..., tuple[Peers, list[str]]], fault: str) -> None:
    run, _ = run_peers(fake(fault), rounds=1)
    assert any("8 blocks differ" in text for text in run.outcomes[0].wrong)
    assert fault == "idle" or any("differs at byte 1000" in text for text in run.outcomes[0].wrong)


def test_a_block_that_was_said_to_be_missing_is_not_wrong(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    run, _ = run_peers(fake("miss"), rounds=1)
    outcome = run.outcomes[0]
    assert (outcome.error, outcome.wrong) == ("", [])
    assert outcome.cells[RETRIEVE, SIZE, 4].failed == 8
    assert outcome.cells[RETRIEVE, SIZE, 4].gb_per_s == [0.0]


def test_a_lookup_that_finds_what_was_never_stored_is_wrong(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    run, _ = run_peers(fake("yes"), rounds=1)
    assert run.outcomes[0].wrong == ["lookup: a key that was never stored was found"]


@pytest.mark.parametrize(
    ("fault", "said"), [("open", "RuntimeError: no such device"), ("die", "the process ended with 3: out of cheese")]
)
def test_a_peer_that_fails_is_told_and_the_others_go_on(
    run_peers: Callable[..., tuple[Peers, list[str]]], fault: str, said: str
) -> None:
    run, told = run_peers(fake(fault), fake())
    broken, whole = run.outcomes
    assert said in broken.error
    assert said in broken.retried  # it was given a second try
    assert not broken.cells
    assert len(whole.cells[STORE, SIZE, 1].gb_per_s) == 2
    assert sum(fault in text for text in told) == 1, "it is not tried in the next round"


def test_an_answer_that_is_none_is_the_peers_error(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    def start(_turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        return {"fault": "chatter", "answers": 3}  # the driver's descriptor for answers is the first that is free

    run, _ = run_peers(dataclasses.replace(fake(), start=start))
    assert run.outcomes[0].error == "not an answer: b'ready'"


def test_a_long_run_has_fewer_rounds_but_three(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    run, _ = run_peers(fake(), rounds=9, total_s=0.0)
    assert run.rounds == 3
    assert len(run.outcomes[0].cells[STORE, SIZE, 1].gb_per_s) == 3


def test_limits_that_cannot_be_read_are_told(settings: PeersSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Peers([fake()], dataclasses.replace(settings, rounds=1), lambda _text: None)

    def read(*_what: Any) -> None:
        raise LowerLayerError("open with O_TMPFILE and O_DIRECT", errno.EINVAL)

    monkeypatch.setattr(run.limits, "read", read)
    run.run()
    assert "O_DIRECT" in run.limits_error
    assert run.outcomes[0].cells


def test_a_flash_directory_that_is_none_is_the_peers_error(settings: PeersSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = Peers([fake()], dataclasses.replace(settings, flash_dir=tmp_path / "file"), lambda _text: None)
    run.run()
    assert "cannot be used" in run.outcomes[0].error


def test_a_peer_that_hangs_is_timed_out_and_its_processes_ended(
    run_peers: Callable[..., tuple[Peers, list[str]]],
) -> None:
    started: list[Turn] = []

    def start(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        started.append(turn)
        turn.server(["sleep", "600"])
        return {"fault": "hang"}

    run, _ = run_peers(dataclasses.replace(fake(), start=start), limit_s=3.0)
    assert run.outcomes[0].error.startswith("timed out in retrieve")
    (turn,) = started
    assert turn.server_pids
    for pid in turn.server_pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not turn.dir.exists()
    assert not turn.flash_dir.exists()


def test_a_server_that_is_not_there_is_the_peers_error(run_peers: Callable[..., tuple[Peers, list[str]]]) -> None:
    def start(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        turn.server(["no-such-server"])
        return {}

    run, _ = run_peers(dataclasses.replace(fake(), start=start))
    assert "no-such-server" in run.outcomes[0].error
    assert "No such file or directory" in run.outcomes[0].error


def test_an_environment_that_cannot_be_made_is_the_error_of_its_peers(settings: PeersSettings, tmp_path: Path) -> None:
    family = Family("absent", requirements=(str(tmp_path / "absent-1.0-py3-none-any.whl"),))
    run = Peers([dataclasses.replace(fake(), family=family), fake()], settings, lambda _text: None)
    run.install()
    assert run.outcomes[0].error.startswith("not installed: ")
    assert "absent" in run.outcomes[0].error
    assert run.outcomes[1].error == ""


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
@pytest.mark.parametrize("name", ["Redis, raw pipeline, TCP", "Redis, raw pipeline, Unix socket"])
def test_redis_by_the_raw_client(
    run_peers: Callable[..., tuple[Peers, list[str]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_WINDOW_BYTES", 3 * SIZE)  # a batch of 4 is asked for in two parts
    (peer,) = (peer for peer in redis.PEERS if peer.name == name)
    run, _ = run_peers(dataclasses.replace(peer, family=HERE), rounds=1)
    (outcome,) = run.outcomes
    assert (outcome.error, outcome.wrong, outcome.retried) == ("", [], "")
    assert outcome.version.startswith("redis-server ")
    assert outcome.cells[STORE, SIZE, 4].failed == outcome.cells[RETRIEVE, SIZE, 4].failed == 0
    assert outcome.cells[STORE, SIZE, 4].server_cpu_s > 0
    assert outcome.cells[LOOKUP, 4096, 16].looked_up == 3 * 16


def test_a_server_that_wipes_out_its_environment_is_ended_too(tmp_path: Path) -> None:
    with Turn(Path(sys.executable), tmp_path, time.monotonic() + 60) as turn:
        pid = turn.server(["env", "-i", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
        while "up" not in turn.log_tail(pid):
            time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_names_of_peers_are_their_own() -> None:
    names = [peer.name for peer in everyone.PEERS]
    assert len(names) == len(set(names))
    assert {name for peer in everyone.PEERS for name in peer.against} <= set(names)
