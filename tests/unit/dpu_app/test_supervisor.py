"""The application as a whole: found by its run file, alone in its state directory, gone without a trace."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import AlreadyExistsError, PreconditionError, UnavailableError, UserError
from dpu_app.region_worker import RegionState
from dpu_app.state_dir import StateDir, read_run_file

if TYPE_CHECKING:
    from tests.unit.dpu_app.conftest import Dpu


async def test_the_run_file_is_there_while_it_runs_and_private(start_dpu: Any, short_dir: Path) -> None:
    state = short_dir / "state"
    with pytest.raises(UnavailableError, match="no DPU application runs"):
        read_run_file(state)
    dpu: Dpu = await start_dpu({})
    run = read_run_file(state)
    assert (run.pid, run.address, run.name) == (os.getpid(), dpu.supervisor.address, "dpu-t")
    assert stat.S_IMODE((state / "run.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert await dpu.stop() == 0
    with pytest.raises(UnavailableError):
        read_run_file(state)


async def test_a_run_file_left_by_a_killed_application_is_told_apart(short_dir: Path) -> None:
    with StateDir(short_dir) as state:
        (short_dir / "run.json").write_text(
            json.dumps({"pid": 2**22 + 1, "address": "a", "dpu_id": "", "name": "", "incarnation": "", "version": ""})
        )
        with pytest.raises(UnavailableError, match="was killed"):
            read_run_file(short_dir)
        (short_dir / "run.json").write_text("{")
        with pytest.raises(UserError, match="damaged"):
            read_run_file(short_dir)
        state.remove_run_file()
        state.remove_run_file()


async def test_only_one_application_uses_a_state_directory(start_dpu: Any) -> None:
    await start_dpu({})
    with pytest.raises(PreconditionError, match="runs already"):
        await start_dpu({})


def test_a_directory_that_holds_other_things_is_not_made_private(short_dir: Path) -> None:
    shared, fresh = short_dir / "shared", short_dir / "fresh"
    for directory in (shared, fresh):
        directory.mkdir()
        directory.chmod(0o755)
    (shared / "theirs").touch()
    with pytest.raises(PreconditionError, match="holds other things"):
        StateDir(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    StateDir(fresh).close()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    shared.chmod(0o700)
    StateDir(shared).close()


async def test_identity_stays_and_incarnation_changes(start_dpu: Any, short_dir: Path) -> None:
    dpu: Dpu = await start_dpu({})
    first = read_run_file(short_dir / "state")
    await dpu.stop()
    await start_dpu({})
    second = read_run_file(short_dir / "state")
    assert first.dpu_id == second.dpu_id
    assert first.incarnation != second.incarnation


async def test_going_down_drains_then_ends_sessions_then_stops(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}}, drain_timeout="7s")
    await dpu.until_state("r0", RegionState.SERVING)
    session = await dpu.open()
    assert await dpu.stop() == 0
    told = dpu.told("r0")
    assert [message["method"] for message in told] == ["session_open", "drain", "session_close", "stop"]
    assert told[1]["params"] == {"timeout_s": 7.0}
    assert told[2]["params"] == {"session_id": session.session_id}


async def test_told_twice_it_does_not_wait_for_the_drain_and_says_so(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {"deaf": "drain"}}, drain_timeout="1h")
    await dpu.until_state("r0", RegionState.SERVING)
    dpu.supervisor.stop()
    await dpu.until(lambda: bool(dpu.told("r0", "drain")))
    assert await dpu.stop() == 1
    assert dpu.told("r0")[-1]["method"] == "stop"


async def test_an_address_in_use_is_an_error_for_people(start_dpu: Any, short_dir: Path) -> None:
    dpu: Dpu = await start_dpu({}, listen="127.0.0.1:0")
    host, _, port = dpu.supervisor.address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port}"):
        await start_dpu({}, listen=f"127.0.0.1:{port}", state_dir=str(short_dir / "other"))
    assert not (short_dir / "other/run.json").exists()


async def test_a_region_both_configured_and_remembered_is_refused(start_dpu: Any, short_dir: Path) -> None:
    dpu: Dpu = await start_dpu({"r0": {}})
    settings = dpu.region("r0").settings
    await dpu.stop()
    (short_dir / "state/regions/r0.yaml").write_text(
        f"settings: {{name: r0, path: {settings.path}, slot: 4KiB, window: 64KiB}}\nmade_file: true\n"
    )
    with pytest.raises(AlreadyExistsError):
        await start_dpu({"r0": {}})
