"""The record and the directories of a pod: what is found, refused, cleaned, and never touched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from common import config
from common.errors import AlreadyExistsError, NotFoundError, UserError
from emulator import pod as pod_module
from emulator import processes
from emulator.pod import Pod
from emulator.pod_settings import PodSettings, PodState, dpu_entry


def _settings(tmp_path: Path, **values: object) -> PodSettings:
    return PodSettings(
        dpus=1,
        capacity_bytes=16 << 20,
        window_bytes=4 << 20,
        run_dir=tmp_path / "run",
        flash_dir=tmp_path / "flash",
        stop_timeout_s=5.0,
        **values,  # type: ignore[arg-type]
    )


def _left_behind(settings: PodSettings, mark: str, pid: int) -> PodState:
    """What a pod whose `entresol-emu up` is long gone left on disk."""
    flash_dir = settings.flash_dir / "pod-0"
    dpu = dpu_entry(settings, flash_dir, 0)
    dpu = type(dpu)(**{**vars(dpu), "pid": pid})
    state = PodState(
        mark=mark,
        started_s=0.0,
        settings=settings,
        agent_config=settings.run_dir / "agent.yaml",
        flash_dir=flash_dir,
        dpus=(dpu,),
    )
    dpu.config.parent.mkdir(parents=True)
    flash_dir.mkdir(parents=True)
    dpu.flash[0].write_bytes(b"x")
    dpu.log.write_text("the DPU's log")
    state.agent_config.write_text("agent")
    (settings.run_dir / "pod.json").write_text(json.dumps(config.to_plain(state)))
    return state


def test_no_pod_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="entresol-emu up"):
        Pod.find(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mark": 1}', "\x00"])
def test_a_damaged_record_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "pod.json").write_text(text)
    with pytest.raises(UserError, match=r"pod\.json"):
        Pod.find(tmp_path)


def test_down_of_a_dead_pod_removes_its_files_and_no_other(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _left_behind(settings, "00" * 16, pid=os.getpid())  # a pid that is someone else's by now
    (settings.run_dir / "notes.txt").write_text("mine")
    pod = Pod.find(settings.run_dir)
    assert pod.running() == []
    assert not pod.is_alive(pod.state.dpus[0])
    assert pod.down() == []
    assert [entry.name for entry in settings.run_dir.iterdir()] == ["notes.txt"]
    assert list(settings.flash_dir.iterdir()) == []
    assert pod.down() == [], "idempotent"


def test_down_removes_a_run_directory_that_is_empty_then(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _left_behind(settings, "00" * 16, pid=1)
    Pod.find(settings.run_dir).down()
    assert not settings.run_dir.exists()


def test_up_is_refused_while_a_process_of_the_pod_runs(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    mark = "1f" * 16
    waiting = [sys.executable, "-c", "import signal; signal.pause()"]
    pid = processes.start_detached(waiting, mark, tmp_path / "log", os.environ)
    _left_behind(settings, mark, pid)
    pod = Pod.find(settings.run_dir)
    try:
        assert pod.is_alive(pod.state.dpus[0])
        with pytest.raises(AlreadyExistsError, match="entresol-emu down"):
            Pod.up(settings)
    finally:
        pod.down()
    assert not processes.carries_mark(pid, mark)
    assert not settings.run_dir.exists()


def test_up_refuses_a_directory_that_holds_other_things(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings.run_dir.mkdir()
    (settings.run_dir / "thesis.tex").write_text("x")
    mode = settings.run_dir.stat().st_mode
    with pytest.raises(UserError, match=r"thesis\.tex"):
        Pod.up(settings)
    assert [entry.name for entry in settings.run_dir.iterdir()] == ["thesis.tex"]
    assert settings.run_dir.stat().st_mode == mode


def test_up_wants_room_for_its_flash(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings = PodSettings(**{**vars(settings), "capacity_bytes": 1 << 60})
    with pytest.raises(UserError, match="free"):
        Pod.up(settings)
    assert not settings.run_dir.exists()
    assert list(settings.flash_dir.iterdir()) == []


def test_up_says_that_no_file_can_be_made_where_flash_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = PodSettings(**{**vars(_settings(tmp_path)), "flash_dir": tmp_path / "file" / "flash"})
    with pytest.raises(UserError, match="cannot be used for flash files: Not a directory"):
        Pod.up(settings)
    assert not settings.run_dir.exists()


def test_up_cleans_what_a_dead_pod_left_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(tmp_path)
    state = _left_behind(settings, "00" * 16, pid=os.getpid())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))  # so that nothing is started
    told: list[str] = []
    with pytest.raises(Exception, match="posix_spawn"):
        Pod.up(settings, told.append)
    assert len(told) == 1
    assert not state.flash_dir.exists()
    assert not settings.run_dir.exists(), "an up that failed leaves nothing either"
    assert list(settings.flash_dir.iterdir()) == []


def test_a_lock_on_a_directory_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pod_module._locked(run_dir):
        assert (run_dir / ".lock").stat().st_mode & 0o777 == 0o600
        assert run_dir.stat().st_mode & 0o777 == 0o700
    assert not run_dir.exists()
    with pod_module._locked(run_dir):
        assert (run_dir / ".lock").exists()
