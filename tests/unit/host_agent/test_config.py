"""The agent's configuration file: what it accepts, and where its paths start."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import config as files
from common.errors import UserError
from dpu_app.config import DpuConfig
from host_agent import config

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_examples_of_dpu_and_agent_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    dpu = files.load_file(CONFIGS / "dpu.yaml", DpuConfig)
    assert config.load(CONFIGS / "agent.yaml").dpus == (dpu.listen_address(),)


def test_sockets_start_at_the_files_directory(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("dpus: ['unix:a/../b.sock', 'unix:/c.sock', 'dpu7:1']\ntenant: t\n")
    assert config.load(file).dpus == (f"unix:{tmp_path}/b.sock", "unix:/c.sock", "dpu7:1")


def test_one_socket_by_two_names_is_a_dpu_twice(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("dpus: ['unix:b.sock', 'unix:./b.sock']\ntenant: t\n")
    with pytest.raises(UserError, match=r"agent.yaml: dpus: names a DPU twice"):
        config.load(file)
