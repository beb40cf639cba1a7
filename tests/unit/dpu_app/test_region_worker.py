"""A region worker's process is started, watched, restarted and stopped, and what became of it is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import DeadlineError, UnavailableError
from dpu_app import region_worker
from dpu_app.region_worker import BackOff, RegionState

if TYPE_CHECKING:
    from tests.unit.dpu_app.conftest import Dpu


def test_back_off_doubles_up_to_its_bound() -> None:
    back_off = BackOff(first_s=0.2, last_s=30)
    assert [back_off.delay_s(failures) for failures in (1, 2, 3, 8, 9, 10_000)] == [0.2, 0.4, 0.8, 25.6, 30, 30]


async def test_one_region_that_fails_does_not_stop_the_others(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"bad": {"fail": "user", "message": "superblock of another"}, "good": {}})
    await dpu.until_state("good", RegionState.SERVING)
    await dpu.until_state("bad", RegionState.FAILED)
    worker = dpu.region("bad").worker
    assert (worker.message, worker.restarts, worker.pid) == ("superblock of another", 0, 0)
    with pytest.raises(UnavailableError, match="bad is failed"):
        await worker.status()


async def test_a_lower_layers_failure_is_tried_again(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {"fail": "lower"}})
    worker = dpu.region("r0").worker
    await dpu.until(lambda: worker.restarts >= 3)
    await dpu.until_state("r0", RegionState.RESTARTING)
    assert "open failed: Input/output error; next try in 0.05 s" in worker.message


async def test_a_worker_that_crashes_is_restarted_and_the_cause_is_told(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {"crash": "yes"}})
    worker = dpu.region("r0").worker
    await dpu.until(lambda: worker.restarts >= 2)
    await dpu.until(lambda: "exit code 9" in worker.message)


async def test_a_killed_worker_is_replaced_by_one_with_the_same_region(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    worker = dpu.region("r0").worker
    before, uuid = worker.pid, worker.facts and worker.facts.uuid
    os.kill(before, signal.SIGKILL)
    await dpu.until(lambda: worker.restarts == 1 and worker.state is RegionState.SERVING)
    assert worker.pid not in (0, before)
    assert worker.facts is not None
    assert worker.facts.uuid == uuid


async def test_a_worker_that_hangs_is_killed_and_replaced(start_dpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_worker, "SILENCE_CHECK_S", 0.01)
    monkeypatch.setattr(region_worker, "SILENCE_MAX_S", 0.05)
    dpu: Dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    worker = dpu.region("r0").worker
    os.kill(worker.pid, signal.SIGSTOP)
    await dpu.until(lambda: worker.restarts >= 1)


async def test_a_program_that_is_no_worker_is_not_waited_for(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    worker = dpu.region("r0").worker
    await worker.stop()
    worker._command = ("/nonexistent/worker",)
    worker.start()
    await dpu.until(lambda: worker.restarts >= 1)
    assert "could not be started" in worker.message


async def test_a_worker_that_does_not_stop_is_killed_within_the_time(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {"deaf": "stop"}})
    await dpu.until_state("r0", RegionState.SERVING)
    worker = dpu.region("r0").worker
    pid = worker.pid
    assert await worker.stop(0.1) is False
    assert worker.state is RegionState.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await worker.stop(0.1) is True


async def test_stopping_is_clean_whatever_the_worker_is_at(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}})
    worker = dpu.region("r0").worker
    assert await worker.stop() is True  # starting
    worker.start()
    await worker.settled(20)
    assert await worker.stop() is True  # serving
    assert [message["method"] for message in dpu.told("r0")] == ["stop"]


async def test_waiting_for_a_region_ends(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}})
    worker = dpu.region("r0").worker
    with pytest.raises(DeadlineError, match="r0 is not ready after 0 s"):
        await worker.settled(0)


async def test_workers_hold_no_descriptor_but_their_own(start_dpu: Any) -> None:
    dpu: Dpu = await start_dpu({"r0": {}, "r1": {}})
    for name in ("r0", "r1"):
        await dpu.until_state(name, RegionState.SERVING)
    for name in ("r0", "r1"):
        descriptors = Path(f"/proc/{dpu.region(name).worker.pid}/fd")
        sockets = [link for link in descriptors.iterdir() if os.readlink(link).startswith("socket:")]
        assert len(sockets) == 1, "a worker must see the other's channel close"
