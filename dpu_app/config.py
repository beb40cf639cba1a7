"""What the DPU application's configuration file says (configs/dpu.yaml), and what a region worker is started with.

Declares and cross-checks settings; `common.config` reads them. Opens nothing. A key of the file drops its field's
unit: `slot_bytes` is written ``slot: 2MiB``.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from common import config
from common.config import Between, DurationS, FieldError, SizeBytes
from common.errors import UserError
from common.log import LogSettings
from dpu_app.regions.eviction import POLICIES as EVICTION_POLICIES

BLOCK_BYTES = 4096
SLOT_BYTES_MAX = 1 << 30
FRAMES_MIN = 4
ADMISSION_POLICIES = ("all", "second_request")
UNIX_PATH_BYTES_MAX = 107
"""`sun_path` of a Unix socket, without its terminating zero."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

Fraction = Annotated[float, Between(0.0, 1.0)]


def _require_name(field_name: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise FieldError(field_name, f"{name!r} is no name: use up to 63 letters, digits, '.', '_' and '-'")


def _require_known(field_name: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise FieldError(field_name, f"{name!r} is none of {', '.join(known)}")


def _require_placeholders(field_name: str, text: str, known: tuple[str, ...]) -> None:
    for name in _PLACEHOLDER.findall(text):
        if name not in known:
            listed = ", ".join(f"{{{word}}}" for word in known)
            raise FieldError(field_name, f"{{{name}}} in {text!r} is not known; known: {listed}")


@dataclass(frozen=True)
class FlashSettings:
    """How a region's file or block device is driven."""

    driver: str = "auto"
    """An entry point of `entresol.flash`, or "auto": the best that the kernel allows."""
    options: dict[str, str] = field(default_factory=dict)
    """The driver's own."""
    preallocate: bool = False
    """Take the file's space when it is made, so that a full file system shows then and not later."""


@dataclass(frozen=True)
class AdmissionSettings:
    """The filter that limits flash wear, by its name in `dpu_app.regions.admission`."""

    policy: str = "all"
    """"all", or "second_request": only what is stored a second time within `window_s`."""
    keys: Annotated[int, Between(1024, None)] = 1 << 20
    """How many keys are remembered."""
    window_s: DurationS = 3600.0

    def __post_init__(self) -> None:
        _require_known("policy", self.policy, ADMISSION_POLICIES)


@dataclass(frozen=True)
class RegionSettings:
    """One region. All but `name`, `path`, `slot_bytes` and `window_bytes` may be left out."""

    name: str
    path: Path
    """A file, made with `capacity_bytes` if absent, or a block device."""
    slot_bytes: Annotated[SizeBytes, Between(BLOCK_BYTES, SLOT_BYTES_MAX)]
    window_bytes: SizeBytes
    """Registered memory for frames of `slot_bytes`."""
    capacity_bytes: SizeBytes | None = None
    """None: all of the file or device that is there."""
    format: Literal["never", "if-blank", "force"] = "if-blank"
    """What to do on opening: "force" comes from the Format call only, never from a file."""
    weight: Annotated[float, Between(0.0, None)] | None = None
    """In placement; None: its capacity."""
    page_bytes: SizeBytes = BLOCK_BYTES
    """Of the window's memory; 2MiB for huge pages."""
    flash: FlashSettings = FlashSettings()
    eviction: str = "s3fifo"
    """By its name in `dpu_app.regions.eviction`."""
    admission: AdmissionSettings = AdmissionSettings()
    dirty_fraction: Fraction = 0.75
    """Of the frames: with more than this not yet on flash, stores are refused as BUSY, so that loads find frames."""
    pins_fraction: Fraction = 0.5
    """Of the slots: no more can be pinned."""
    ttl_default_s: DurationS = 0.0
    """For stores that name none; 0: they do not expire."""
    deadline_default_s: DurationS = 5.0
    deadline_max_s: DurationS = 60.0
    lease_default_s: DurationS = 2.0
    lease_max_s: DurationS = 30.0
    credits: Annotated[int, Between(1, 1024)] = 32
    """Receives posted for each connection: capsules that a client may have outstanding."""
    busy_poll_s: Annotated[DurationS, Between(0.0, 0.01)] = 100e-6
    """After a request the worker looks for the next one for so long before it sleeps, where that pays; 0: never."""

    def __post_init__(self) -> None:
        _require_name("name", self.name)
        _require_known("eviction", self.eviction, EVICTION_POLICIES)
        if self.slot_bytes % BLOCK_BYTES:
            raise FieldError("slot_bytes", f"{self.slot_bytes} bytes is not a multiple of {BLOCK_BYTES}")
        if self.window_bytes < FRAMES_MIN * self.slot_bytes:
            raise FieldError("window_bytes", f"must hold at least {FRAMES_MIN} frames of `slot`")
        if self.capacity_bytes is not None and (self.capacity_bytes % BLOCK_BYTES or not self.capacity_bytes):
            raise FieldError("capacity_bytes", f"must be a multiple of {BLOCK_BYTES} bytes, and not 0")
        if self.page_bytes < BLOCK_BYTES or self.page_bytes & (self.page_bytes - 1):
            raise FieldError("page_bytes", "must be a power of two, at least 4KiB")
        for name in ("deadline", "lease"):
            if not 0 < getattr(self, f"{name}_default_s") <= getattr(self, f"{name}_max_s"):
                raise FieldError(f"{name}_default_s", f"must be more than 0 and at most {name}_max")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the file."""
        return config.to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "region settings") -> RegionSettings:
        """Raises ConfigError."""
        return config.from_plain(cls, values, source)


@dataclass(frozen=True)
class FabricSettings:
    """Over what the regions are reached."""

    name: str
    """An entry point of `entresol.fabric`."""
    listen: str
    """In the backend's own form; {region} and {state_dir} are filled in, since each region listens for itself."""
    options: dict[str, str] = field(default_factory=dict)
    """The backend's own."""
    client_options: dict[str, str] = field(default_factory=dict)
    """Told to agents: what their side of the backend must be created with."""

    def __post_init__(self) -> None:
        _require_placeholders("listen", self.listen, ("region", "state_dir"))


@dataclass(frozen=True)
class TenantSettings:
    name: str
    quota_per_region_bytes: SizeBytes = 0
    """What its blocks may take in each region; 0: no limit."""


@dataclass(frozen=True)
class DpuConfig:
    """The whole file."""

    name: str
    state_dir: Path
    """Private to the user: run.json, the regions made by RPC, sockets. Made if absent."""
    fabric: FabricSettings
    listen: str = "unix:{state_dir}/control.sock"
    """gRPC: unix:PATH, which only this user reaches, or host:port. {state_dir} is filled in."""
    allow_remote: bool = False
    """Needed for a `listen` beyond this machine: there is no authentication but the tenant's name."""
    session_ttl_s: Annotated[DurationS, Between(0.1, 3600)] = 6.0
    sessions_max: Annotated[int, Between(1, 65536)] = 1024
    tenants: tuple[TenantSettings, ...] = ()
    other_tenants: bool = True
    """Whether tenants that are not listed are served."""
    other_tenants_quota_per_region_bytes: SizeBytes = 0
    regions: tuple[RegionSettings, ...] = ()
    drain_timeout_s: Annotated[DurationS, Between(0.1, 3600)] = 20.0
    """On SIGTERM: how long dirty blocks may take to reach flash before the workers are stopped all the same."""
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        _require_name("name", self.name)
        _require_placeholders("listen", self.listen, ("state_dir",))
        self._check_listen()
        _require_unique("tenants", "name", [tenant.name for tenant in self.tenants])
        _require_unique("regions", "name", [region.name for region in self.regions])
        _require_unique("regions", "path", [str(region.path) for region in self.regions])
        for region in self.regions:
            if region.format == "force":
                raise FieldError(
                    "regions",
                    f"{region.name}: format 'force' would empty it at every start; "
                    "use 'if-blank', and 'entresol-dpu regions format' to empty it once",
                )

    def _check_listen(self) -> None:
        address = self.listen_address()
        if address.startswith("unix:"):
            if not self.listen.startswith(("unix:/", "unix:{state_dir}")):
                raise FieldError("listen", f"{self.listen!r} is relative: write unix:{{state_dir}}/... or unix:/...")
            if len(address.removeprefix("unix:").encode()) > UNIX_PATH_BYTES_MAX:
                raise FieldError("listen", f"the socket's path is longer than {UNIX_PATH_BYTES_MAX} bytes")
            return
        host, separator, port = address.rpartition(":")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            raise FieldError("listen", f"{self.listen!r} is neither host:port nor unix:PATH")
        if not _is_loopback(host.strip("[]")) and not self.allow_remote:
            raise FieldError("listen", f"{host} reaches beyond this machine; set allow_remote if that is meant")

    def listen_address(self) -> str:
        """`listen`, filled in."""
        return self.listen.replace("{state_dir}", str(self.state_dir))


def _require_unique(field_name: str, what: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise FieldError(field_name, f"two have the {what} {value!r}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class WorkerConfig:
    """What the supervisor tells a region worker in its first message."""

    dpu_name: str
    region: RegionSettings
    fabric: FabricSettings
    """`listen` is filled in."""
    quotas_bytes: dict[str, int] = field(default_factory=dict)
    """By tenant, in this region; 0: no limit."""
    quota_default_bytes: int = 0
    log: LogSettings = field(default_factory=LogSettings)

    def to_dict(self) -> dict[str, Any]:
        return config.to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkerConfig:
        """Raises ConfigError."""
        return config.from_plain(cls, values, "the supervisor's start message")


def worker_config(dpu: DpuConfig, region: RegionSettings) -> WorkerConfig:
    """What the worker of `region` is started with."""
    listen = dpu.fabric.listen.replace("{region}", region.name).replace("{state_dir}", str(dpu.state_dir))
    return WorkerConfig(
        dpu_name=dpu.name,
        region=region,
        fabric=dataclasses.replace(dpu.fabric, listen=listen),
        quotas_bytes={tenant.name: tenant.quota_per_region_bytes for tenant in dpu.tenants},
        quota_default_bytes=dpu.other_tenants_quota_per_region_bytes,
        log=dpu.log,
    )


def region_from_text(name: str, path: Path, settings: Mapping[str, str]) -> RegionSettings:
    """A region as the Create call describes it: keys and units of the file, nested ones with dots
    (``flash.driver``), each value as it would stand in the file. Raises UserError."""
    source = f"settings of region {name!r}"
    values: dict[str, Any] = {"name": name, "path": str(path)}
    for key, text in settings.items():
        place = values
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(f"{source}: {key}: {parent} is a value, not a group")
        if last in place:
            raise UserError(f"{source}: {key}: is given twice")
        place[last] = config.plain_scalar(text)
    region = RegionSettings.from_dict(values, source)
    if region.format == "force":
        raise UserError(f"{source}: format: 'force' is for the Format call")
    return region
