"""What an emulated pod is made of: its settings, its record on disk, and the configuration files of its parts.

Pure: makes values and texts, starts and writes nothing. `emulator.pod` does that. The DPU application and the agent
get ordinary configuration files; all that makes a pod an emulated one is the fabric that they name.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from common import config
from common.config import Between, DurationS, FieldError, SizeBytes
from common.log import LogSettings
from dpu_app.config import UNIX_PATH_BYTES_MAX, DpuConfig, FabricSettings, FlashSettings, RegionSettings
from host_agent.config import AgentSettings, NamespaceSettings

_LONGEST_SOCKET: Final = "/dpu15/state/region15.sock"
_FABRIC_LISTEN: Final = {"emu-shm": "{state_dir}/{region}.sock", "emu-tcp": "127.0.0.1:0"}
FABRICS: Final = tuple(_FABRIC_LISTEN)


def default_run_dir() -> Path:
    """$XDG_RUNTIME_DIR/entresol, or ~/.cache/entresol/run where there is no such directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "entresol" if runtime and Path(runtime).is_dir() else _cache_dir() / "run"


def default_flash_dir() -> Path:
    """~/.cache/entresol/flash: on a disk, as O_DIRECT needs, which the run directory often is not."""
    return _cache_dir() / "flash"


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entresol"


@dataclass(frozen=True)
class PodSettings:
    """What to emulate (configs/emulator.yaml); the options of `entresol-emu up` by the same names win."""

    dpus: Annotated[int, Between(1, 16)] = 2
    regions: Annotated[int, Between(1, 16)] = 2
    """Of each DPU."""
    fabric: str = "emu-shm"
    capacity_bytes: SizeBytes = 1 << 30
    """Of each region's flash file."""
    slot_bytes: SizeBytes = 256 << 10
    window_bytes: SizeBytes = 64 << 20
    """Of each region. Where all that is in use fits the windows, nothing ever comes from flash."""
    page_bytes: SizeBytes = 4096
    """Of the windows' memory; 2MiB where huge pages are set up."""
    flash_driver: str = FlashSettings.driver
    eviction: str = RegionSettings.eviction
    busy_poll_s: DurationS = RegionSettings.busy_poll_s
    """Of the region workers; see `dpu_app.config`."""
    session_ttl_s: DurationS = 6.0
    tenant: str = "demo"
    """Whom the agents' configuration file speaks for."""
    namespace: NamespaceSettings = field(default_factory=NamespaceSettings)
    """Of that file; its `block` is the pod's `slot`."""
    run_dir: Path = field(default_factory=default_run_dir)
    """Configurations, logs, sockets."""
    flash_dir: Path = field(default_factory=default_flash_dir)
    ready_timeout_s: Annotated[DurationS, Between(0.1, 600)] = 30.0
    stop_timeout_s: Annotated[DurationS, Between(0.1, 600)] = 20.0
    """After it whatever still runs is killed."""
    log: LogSettings = field(default_factory=LogSettings)
    """Of the DPUs."""

    def __post_init__(self) -> None:
        if self.fabric not in FABRICS:
            raise FieldError("fabric", f"{self.fabric!r} is none of {', '.join(FABRICS)}")
        room = UNIX_PATH_BYTES_MAX - len(_LONGEST_SOCKET)
        if len(str(self.run_dir.absolute()).encode()) > room:
            raise FieldError("run_dir", f"{self.run_dir} is too long for the sockets in it; at most {room} bytes")
        dpu_config(self, dpu_entry(self, self.flash_dir, 0))


@dataclass(frozen=True)
class DpuEntry:
    """One DPU process of a pod. Paths are absolute."""

    name: str
    config: Path
    state_dir: Path
    log: Path
    control: str
    """Where its gRPC service listens, as gRPC clients write it."""
    flash: tuple[Path, ...]
    pid: int = 0
    """0: not started yet."""


@dataclass(frozen=True)
class PodState:
    """`pod.json`: what another `entresol-emu` must know to inspect and end the pod."""

    mark: str
    """See `emulator.processes`."""
    started_s: float
    """Seconds since 1970."""
    settings: PodSettings
    agent_config: Path
    flash_dir: Path
    """The pod's own directory below `settings.flash_dir`."""
    dpus: tuple[DpuEntry, ...] = ()


def dpu_entry(settings: PodSettings, flash_dir: Path, index: int) -> DpuEntry:
    """Where the parts of DPU number `index` are."""
    name = f"dpu{index}"
    home = settings.run_dir.absolute() / name
    return DpuEntry(
        name=name,
        config=home / "dpu.yaml",
        state_dir=home / "state",
        log=home / "dpu.log",
        control=f"unix:{home}/state/control.sock",
        flash=tuple(flash_dir.absolute() / f"{name}-region{number}.img" for number in range(settings.regions)),
    )


def dpu_config(settings: PodSettings, dpu: DpuEntry) -> DpuConfig:
    """What the DPU is started with. Raises FieldError for sizes that no region can have."""
    return DpuConfig(
        name=dpu.name,
        state_dir=dpu.state_dir,
        fabric=FabricSettings(name=settings.fabric, listen=_FABRIC_LISTEN[settings.fabric]),
        listen="unix:{state_dir}/control.sock",
        session_ttl_s=settings.session_ttl_s,
        regions=tuple(
            RegionSettings(
                name=f"region{number}",
                path=path,
                slot_bytes=settings.slot_bytes,
                window_bytes=settings.window_bytes,
                capacity_bytes=settings.capacity_bytes,
                page_bytes=settings.page_bytes,
                flash=FlashSettings(driver=settings.flash_driver),
                eviction=settings.eviction,
                busy_poll_s=settings.busy_poll_s,
            )
            for number, path in enumerate(dpu.flash)
        ),
        log=settings.log,
    )


def agent_config_text(state: PodState) -> str:
    """The file for `entresol-agent --config`: every DPU of the pod."""
    settings = state.settings
    return config.to_yaml(
        AgentSettings(
            dpus=tuple(dpu.control for dpu in state.dpus),
            tenant=settings.tenant,
            page_bytes=settings.page_bytes,
            namespace=dataclasses.replace(settings.namespace, block_bytes=settings.slot_bytes),
        )
    )
