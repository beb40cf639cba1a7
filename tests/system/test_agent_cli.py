"""`entresol-agent` as a user runs it, against a real pod: files there and back, exit codes, JSON, plain errors."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent import config

if TYPE_CHECKING:
    from tests.system.conftest import Place


class Agent:
    def __init__(self, config: Path) -> None:
        self.config = config

    def __call__(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "host_agent.cli", "--config", str(self.config), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, input=given)

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def agent(place: Place) -> Iterator[Agent]:
    place.flash_dir.mkdir(parents=True)
    settings = PodSettings(
        dpus=2,
        regions=2,
        capacity_bytes=64 << 20,
        slot_bytes=128 << 10,
        window_bytes=8 << 20,
        run_dir=place.run_dir,
        flash_dir=place.flash_dir,
    )
    pod = Pod.up(settings)
    try:
        yield Agent(pod.state.agent_config)
    finally:
        pod.down()


def test_a_file_goes_there_and_comes_back(agent: Agent, tmp_path: Path) -> None:
    file, manifest, back = tmp_path / "file", tmp_path / "manifest.json", tmp_path / "back"
    content = random.Random(1).randbytes(3_000_001)
    file.write_bytes(content)
    stored = agent.json("put", str(file), "-m", str(manifest), "--block", "128KiB")
    assert stored["statuses"] == {"ok": 23}
    assert stored["length_bytes"] == len(content)
    again = agent("put", str(file), "--block", "128KiB")
    assert again.returncode == 0
    assert "23 exists" in again.stderr
    assert json.loads(again.stdout)["blocks"] == json.loads(manifest.read_text())["blocks"]

    assert agent.json("lookup", str(manifest))["prefix_blocks"] == 23
    assert agent.json("prefetch", str(manifest))["statuses"] == {"ok": 23}
    assert agent.json("pin", str(manifest), "--ttl", "60s")["statuses"] == {"ok": 23}
    listed = [json.loads(line) for line in agent("list", str(manifest), "--json").stdout.splitlines()]
    assert len(listed) == 23
    assert all(block["pinned"] for block in listed)
    assert agent.json("unpin", str(manifest))["statuses"] == {"ok": 23}
    assert agent.json("touch", str(manifest))["statuses"] == {"ok": 23}

    assert agent.json("get", str(manifest), "-o", str(back))["statuses"] == {"ok": 23}
    assert back.read_bytes() == content
    assert stat.S_IMODE(back.stat().st_mode) == 0o600
    from_stdin = agent("get", "-", "-o", str(back), given=manifest.read_text())
    assert from_stdin.returncode == 0, from_stdin.stderr

    one = json.loads(manifest.read_text())["blocks"][4]["key"]
    assert len(json.loads(manifest.read_text())["blocks"]) == 23
    gone = tmp_path / "gone"
    assert agent("delete", str(manifest)).returncode == 0
    missing = agent("get", str(manifest), "-o", str(gone))
    assert missing.returncode == 1
    assert "23 miss" in missing.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "file", "manifest.json"], "nothing half written"
    looked = agent("lookup", "--key", one)
    assert looked.returncode == 1
    assert one in looked.stdout


def test_generated_blocks_and_statistics(agent: Agent) -> None:
    stored = agent.json("put", "--generate", "10", "--block", "64KiB", "--until", "flash", "--seed", "7")
    assert stored["statuses"] == {"ok": 10}
    assert len(stored["manifest"]["blocks"]) == 10
    report = agent.json("stat")
    assert [region["connected"] for region in report["regions"]] == [True] * 4
    assert sum(region["stats"]["slots_used"] for region in report["regions"]) == 10
    assert report["unreachable"] == {}
    table = agent("stat").stdout
    assert "dpu0/region0" in table
    assert "connected" in table


def test_a_time_to_live_below_a_second_is_not_without_end(agent: Agent) -> None:
    assert agent("put", "--generate", "2", "--block", "4KiB", "--ttl", "200ms").returncode == 0
    listed = [json.loads(line) for line in agent("list", "--json").stdout.splitlines()]
    assert all(0 < block["ttl_s"] <= 1 for block in listed)


def test_a_file_larger_than_the_windows(agent: Agent, tmp_path: Path) -> None:
    file, manifest, back = tmp_path / "file", tmp_path / "manifest.json", tmp_path / "back"
    content = random.Random(2).randbytes(96 << 20)  # of 4 x 8 MiB of windows, and 4 x 64 MiB of flash
    file.write_bytes(content)
    stored = agent.json("put", str(file), "-m", str(manifest), "--block", "128KiB", "--until", "flash")
    assert stored["statuses"] == {"ok": 768}
    assert agent.json("get", str(manifest), "-o", str(back))["statuses"] == {"ok": 768}
    assert back.read_bytes() == content


def test_mistakes_are_told_plainly(agent: Agent, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    manifest = tmp_path / "manifest.json"
    assert agent("put", "--generate", "2", "--block", "4KiB", "-m", str(manifest)).returncode == 0
    for arguments, code, text in (
        (["put", str(empty)], 2, "is empty"),
        (["put"], 2, "either a FILE or --generate"),
        (["get", str(empty), "-o", str(tmp_path / "x")], 2, "not a manifest"),
        (["get", str(tmp_path / "nothing"), "-o", "x"], 2, "cannot be read"),
        (["get", str(manifest), "-o", str(tmp_path)], 2, "is a directory"),
        (["get", str(manifest), "-o", "/proc/x"], 2, "/proc/x: cannot be written"),
        (["get", str(manifest), "-o", str(tmp_path / "absent" / "x")], 2, "no such directory"),
        (["put", str(manifest), "-m", str(tmp_path)], 2, "is a directory"),
        (["put", str(manifest), "-m", "/proc/x"], 2, "/proc/x: the manifest cannot be written"),
        (["lookup"], 2, "say which blocks"),
        (["lookup", "--key", "12"], 2, "hexadecimal"),
        (["put", "--generate", "1", "--block", "5"], 2, "unit"),
    ):
        done = agent(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert text in done.stderr
        assert "Traceback" not in done.stderr


def test_a_dpu_that_does_not_answer_is_told_and_left_out(agent: Agent) -> None:
    settings = config.load(agent.config)
    assert agent("put", "--generate", "1", "--block", "4KiB").stderr == "1 block stored: 1 ok\n"
    known = ["--dpu", settings.dpus[0], "--dpu", "unix:/nonexistent"]
    listed = agent(*known, "list", "--json")
    assert listed.returncode == 0
    assert listed.stderr.startswith("entresol-agent: goes on without unix:/nonexistent: ")
    stat = agent(*known, "stat", "--json")
    assert list(json.loads(stat.stdout)["unreachable"]) == ["unix:/nonexistent"]


def test_no_pod() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENTRESOL_")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "host_agent.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)

    nobody = run("--dpu", "unix:/nonexistent/control.sock", "stat")
    assert nobody.returncode == 3
    assert "no DPU answers" in nobody.stderr
    assert "entresol-dpu" in nobody.stderr
    assert run("stat").returncode == 2
    assert run("--dpu", "nonsense", "stat").returncode == 2
    shown = run("config-check", str(Path(__file__).parents[2] / "configs" / "agent.yaml"))
    assert shown.returncode == 0
    assert "sound" in shown.stdout
