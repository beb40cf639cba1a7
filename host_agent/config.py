"""What the agent's configuration file says (configs/agent.yaml). Declares and cross-checks; opens nothing.

`common.config` reads the file: a key drops its field's unit, so `timeout_s` is written ``timeout: 2s``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from common import config
from common.config import Between, DurationS, FieldError, SizeBytes
from common.errors import UserError
from common.identity import UNKNOWN, NamespaceRecord
from common.log import LogSettings


@dataclass(frozen=True)
class ReconnectSettings:
    """Pauses between attempts to reach a DPU or region again: doubled each time, each cut by up to half at random so
    that agents do not come back all at once."""

    pause_first_s: Annotated[DurationS, Between(0.001, None)] = 0.05
    pause_max_s: Annotated[DurationS, Between(0.001, None)] = 2.0
    give_up_s: DurationS = 0.0
    """No more attempts after so long without success; 0: never give up."""

    def __post_init__(self) -> None:
        if self.pause_max_s < self.pause_first_s:
            raise FieldError("pause_max_s", "must be at least pause_first")


@dataclass(frozen=True)
class NamespaceSettings:
    """The namespace record of `common.identity`, field by field; what is left out is *unknown*, which is a value of
    its own and matches only itself. Write "" for what is known to be absent, such as a LoRA."""

    model_id: str | None = None
    weights_revision: str | None = None
    lora_id: str | None = None
    lora_revision: str | None = None
    kv_dtype: str | None = None
    quantisation: str | None = None
    layout: str | None = None
    page_tokens: int | None = None
    block_tokens: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    tp_rank: int | None = None
    tp_size: int | None = None
    pp_rank: int | None = None
    pp_size: int | None = None
    cp_rank: int | None = None
    cp_size: int | None = None
    salt: str = ""
    block_bytes: Annotated[SizeBytes, Between(1, None)] = 1 << 20
    """Largest block; picks the regions by their slot size, and is what `put` cuts files into."""

    def record(self, tenant: str) -> NamespaceRecord:
        """Raises UserError."""
        values: dict[str, Any] = {
            item.name: UNKNOWN if getattr(self, item.name) is None else getattr(self, item.name)
            for item in dataclasses.fields(NamespaceRecord)
            if item.name not in ("tenant", "salt")
        }
        return NamespaceRecord(tenant=tenant, salt=self.salt.encode(), **values)


@dataclass(frozen=True)
class AgentSettings:
    """One agent: as one tenant, using the regions of all its DPUs."""

    dpus: tuple[str, ...]
    """gRPC addresses of the DPUs, host:port or unix:PATH."""
    tenant: str
    name: str = ""
    """For the DPU's logs and status; empty: host and process id."""
    timeout_s: Annotated[DurationS, Between(0.001, 3600)] = 2.0
    """Of a call on the data path that names none."""
    connect_timeout_s: Annotated[DurationS, Between(0.01, 3600)] = 5.0
    """How long opening the client waits for the DPUs."""
    control_timeout_s: Annotated[DurationS, Between(0.01, 3600)] = 2.0
    """Of one call on the control plane, and of one attempt to connect to a region."""
    verify: bool = False
    """Compare checksums on this side too, in every call that does not say."""
    capsules_in_flight: Annotated[int, Between(2, 256)] = 16
    """On each connection, at most as many as the DPU grants. Each takes 128 KiB of registered memory."""
    busy_poll_s: Annotated[DurationS, Between(0, 0.01)] = 100e-6
    """How long a call looks for its answer again and again before it sleeps until it is woken; it stops doing so where
    that did not pay lately. Saves the time to be woken, and takes a core meanwhile. 0: sleep at once."""
    page_bytes: Annotated[SizeBytes, Between(4096, None)] = 4096
    """Of memory from the fabric; 2MiB for huge pages."""
    fabrics: tuple[str, ...] = ()
    """Which fabrics to use, best first; empty: what the DPU offers, in its order."""
    reconnect: ReconnectSettings = ReconnectSettings()
    namespace: NamespaceSettings = field(default_factory=NamespaceSettings)
    """Of the command line's blocks."""
    log: LogSettings = field(default_factory=lambda: LogSettings(level="warning"))

    def __post_init__(self) -> None:
        if not self.dpus:
            raise FieldError("dpus", "names no DPU")
        if len(set(self.dpus)) != len(self.dpus):
            raise FieldError("dpus", "names a DPU twice")
        for address in self.dpus:
            host, _, port = address.rpartition(":")
            if not address.startswith("unix:") and not (host and port.isdecimal()):
                raise FieldError("dpus", f"{address!r} is neither host:port nor unix:PATH")
        if not self.tenant:
            raise FieldError("tenant", "must be given")
        if self.page_bytes & (self.page_bytes - 1):
            raise FieldError("page_bytes", "must be a power of two")
        try:
            self.namespace.record(self.tenant)
        except UserError as error:
            raise FieldError("namespace", str(error)) from error


def load(path: str | Path) -> AgentSettings:
    """Relative paths in it, those of `dpus` too, start at the file's directory. Raises UserError, which names file,
    line and key."""
    settings = config.load_file(path, AgentSettings)
    directory = Path(path).parent.resolve()
    try:
        return dataclasses.replace(settings, dpus=tuple(_absolute(address, directory) for address in settings.dpus))
    except FieldError as error:
        raise UserError(f"{path}: {error.field}: {error}") from error


def _absolute(address: str, directory: Path) -> str:
    socket = address.removeprefix("unix:")
    return address if socket == address else f"unix:{os.path.normpath(directory / socket)}"
