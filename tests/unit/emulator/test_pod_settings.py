"""Settings of a pod become configuration files that the DPU and the agent accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common import config
from common.config import ConfigError, FieldError
from dpu_app.config import DpuConfig
from emulator.pod_settings import PodSettings, PodState, agent_config_text, dpu_config, dpu_entry
from host_agent.config import AgentSettings

REPOSITORY = Path(__file__).parents[3]


def _state(settings: PodSettings, tmp_path: Path) -> PodState:
    flash_dir = tmp_path / "flash" / "pod-0"
    return PodState(
        mark="00112233445566778899aabbccddeeff",
        started_s=1.5,
        settings=settings,
        agent_config=tmp_path / "agent.yaml",
        flash_dir=flash_dir,
        dpus=tuple(dpu_entry(settings, flash_dir, index) for index in range(settings.dpus)),
    )


@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
def test_the_files_of_its_parts_are_accepted(tmp_path: Path, fabric: str) -> None:
    settings = PodSettings(dpus=3, regions=2, fabric=fabric, slot_bytes=1 << 20, run_dir=Path("/run/x"))
    state = _state(settings, tmp_path)
    for dpu in state.dpus:
        read = config.load_text(config.to_yaml(dpu_config(settings, dpu)), DpuConfig)
        assert read.fabric.name == fabric
        assert [region.path for region in read.regions] == list(dpu.flash)
        assert read.listen_address() == dpu.control
    agent = config.load_text(agent_config_text(state), AgentSettings)
    assert agent.dpus == tuple(dpu.control for dpu in state.dpus)
    assert agent.namespace.block_bytes == 1 << 20
    assert len({path for dpu in state.dpus for path in dpu.flash}) == 6


def test_the_record_of_a_pod_reads_back_equal(tmp_path: Path) -> None:
    state = _state(PodSettings(run_dir=Path("/run/x"), capacity_bytes=3 << 20), tmp_path)
    assert config.from_plain(PodState, json.loads(json.dumps(config.to_plain(state)))) == state


def test_the_shipped_configuration_says_the_defaults() -> None:
    shipped = config.load_file(REPOSITORY / "configs" / "emulator.yaml", PodSettings)
    assert shipped == PodSettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fabric: verbs", "fabric: 'verbs' is none of emu-shm, emu-tcp"),
        ("slot: 5KiB", "multiple of 4096"),
        ("window: 256KiB", "at least 4 frames"),
        ("dpus: 0", "dpus"),
        ("capacity_bytes: 1GiB", "did you mean 'capacity'"),
        (f"run_dir: /{'x' * 90}", "too long for the sockets"),
    ],
)
def test_what_no_pod_can_be_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load_text(text, PodSettings, "emulator.yaml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("emulator.yaml:")


def test_options_are_checked_like_the_file() -> None:
    with pytest.raises(FieldError):
        PodSettings(fabric="verbs")
