"""What a larger machine would need for the same work: a cost model fitted to measured processor time of region workers.

A call costs a fixed time for each capsule, more for each block and more for each byte. `fit` finds the three from
samples of a report; `need` says what they mean for a DPU under `Assumptions`, each of which has a name and a source and
can be given another value. Pure. It extrapolates: what it says of a DPU is a statement about these assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from common.errors import UserError

TERMS: Final = ("capsules", "blocks", "bytes")
CHECKSUMMED: Final = ("store", "retrieve_cold")
"""Operations in which the worker reads every byte once, for its XXH3; a staged RETRIEVE and a LOOKUP do not."""
_ROWS_MIN: Final = 4


@dataclass(frozen=True)
class Fit:
    """Processor seconds of one operation: `seconds[term]` for each of `TERMS`. Residuals are relative to what was
    measured; `r_squared` is that of the seconds themselves."""

    operation: str
    seconds: Mapping[str, float]
    r_squared: float
    residual_median: float
    residual_max: float
    rows: int
    kernel_share: float = 0.0
    """Of the seconds, those in the kernel."""

    def of(self, capsules: float, blocks: float, size_bytes: float) -> float:
        """What the model says of such a call."""
        terms = zip(TERMS, (capsules, blocks, size_bytes))
        return sum(self.seconds[name] * amount for name, amount in terms)


def fit(operation: str, rows: Sequence[Mapping[str, Any]]) -> Fit:
    """Least squares over `rows` of one operation ("capsules", "blocks", "bytes" and "cpu_s" of a call each), of the
    relative error, so that small calls count as much as large ones. No cost is below zero.

    Raises UserError for rows that cannot tell the terms apart.
    """
    amounts = np.array([[float(row[name]) for name in TERMS] for row in rows]).reshape(-1, len(TERMS))
    measured = np.array([float(row["cpu_s"]) for row in rows])
    usable = measured > 0
    amounts, measured = amounts[usable], measured[usable]
    active = [number for number in range(len(TERMS)) if amounts[:, number].any()]
    if len(measured) < _ROWS_MIN:
        raise UserError(f"{operation}: {len(measured)} samples are too few to fit a cost to")
    scaled = amounts / measured[:, None]
    scales = np.abs(scaled).max(axis=0)
    scales[scales == 0] = 1.0
    if np.linalg.matrix_rank((scaled / scales)[:, active], tol=1e-9) < len(active):
        raise UserError(f"{operation}: the samples do not tell capsules, blocks and bytes apart; measure more sizes")
    solution = np.zeros(len(TERMS))
    while active:
        part = np.linalg.lstsq((scaled / scales)[:, active], np.ones(len(measured)), rcond=None)[0]
        if part.min() >= 0:
            solution[active] = part / scales[active]
            break
        del active[int(part.argmin())]
    said = amounts @ solution
    residuals = np.abs(said / measured - 1)
    spread = float(((measured - measured.mean()) ** 2).sum())
    r_squared = 1 - float(((measured - said) ** 2).sum()) / spread if spread else 0.0
    seconds = {name: float(value) for name, value in zip(TERMS, solution)}
    return Fit(operation, seconds, r_squared, float(np.median(residuals)), float(residuals.max()), len(measured))


def fits(samples: Mapping[str, Any]) -> dict[str, Fit]:
    """Of every operation that a report's "samples" have. Raises UserError."""
    operations = dict.fromkeys(str(row["operation"]) for row in samples["rows"])
    shares = samples.get("kernel_share", {})
    return {
        name: dataclasses.replace(
            fit(name, [row for row in samples["rows"] if row["operation"] == name]), kernel_share=shares.get(name, 0.0)
        )
        for name in operations
    }


def _assumed(default: float, unit: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Assumptions:
    """What the model takes for true of the DPU. Nothing here was measured on one."""

    line_gbit_per_s: float = _assumed(800, "Gb/s", "NVIDIA's announcement of BlueField-4")
    cores: float = _assumed(64, "cores", "NVIDIA's announcement of BlueField-4: 64 Arm Neoverse V2")
    core_ratio: float = _assumed(
        1.0, "x", "speed of one of its cores to one of those measured on; assumed equal, not measured"
    )
    core_busy: float = _assumed(
        0.7, "share", "how busy a core may be before queues grow; a rule of thumb for open arrivals"
    )
    nic_share: float = _assumed(
        1.0, "share", "of the bytes, those that the network card moves instead of a core: all, as RDMA does"
    )
    checksum_engine: float = _assumed(
        0.0,
        "share",
        "of the checksums, those that an engine computes: none; XXH3 is not a known offload",
    )
    kernel_share: float = _assumed(
        1.0,
        "share",
        "of the time in the kernel, what stays; SPDK and polled queues need none of it: all, as measured",
    )
    native_share: float = _assumed(
        0.0, "share", "of the fixed cost and the cost per block, what further native code takes over: none, as measured"
    )
    native_speedup: float = _assumed(10.0, "x", "of what native code takes over; assumed, used with native_share only")
    post_us: float = _assumed(
        0.2,
        "us",
        "posting a work request by verbs, and its share of completions, on top of what was measured; assumed",
    )
    pieces: float = _assumed(1.0, "pieces", "of memory that a block lies in at the host: a work request each")

    def __post_init__(self) -> None:
        for name in ("nic_share", "checksum_engine", "kernel_share", "native_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a share, from 0 to 1")
        for name in ("line_gbit_per_s", "cores", "core_ratio", "core_busy", "native_speedup", "pieces"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} must be above 0")
        if self.core_busy > 1 or self.post_us < 0:
            raise UserError("core_busy is at most 1, and post_us not below 0")

    @property
    def line_bytes_per_s(self) -> float:
        return self.line_gbit_per_s * 1e9 / 8


@dataclass(frozen=True)
class Need:
    """Of one operation at one block size, `batch` blocks a capsule."""

    operation: str
    block_bytes: int
    batch: int
    measured_us: float
    """Of a core here for each block, as measured: the emulator's own copies included."""
    block_us: float
    """Of a DPU's core for each block."""
    per_byte_ns: float
    """Of that, what each byte adds."""
    blocks_per_s: float
    """That fill the line."""
    cores: float
    """That carry them, at `core_busy`."""
    core_gb_per_s: float
    """That one core carries, wholly busy."""


def need(model: Fit, machine: Mapping[str, float], assumed: Assumptions, block_bytes: int, batch: int) -> Need:
    """`machine`: the report's "xxh3_s_per_byte". A LOOKUP moves nothing: `lookups_per_core` is for it."""
    measured_s = model.of(1 / batch, 1, block_bytes)
    byte_s = dpu_byte_s(model, machine, assumed)
    own_s = _own_s(model, assumed, batch)
    block_s = (own_s + block_bytes * byte_s) / assumed.core_ratio + assumed.post_us * assumed.pieces / 1e6
    blocks_per_s = assumed.line_bytes_per_s / block_bytes
    return Need(
        operation=model.operation,
        block_bytes=block_bytes,
        batch=batch,
        measured_us=measured_s * 1e6,
        block_us=block_s * 1e6,
        per_byte_ns=byte_s / assumed.core_ratio * 1e9,
        blocks_per_s=blocks_per_s,
        cores=blocks_per_s * block_s / assumed.core_busy,
        core_gb_per_s=block_bytes / block_s / 1e9,
    )


def dpu_byte_s(model: Fit, machine: Mapping[str, float], assumed: Assumptions) -> float:
    """What a byte costs there, at the speed of a core here: the checksum, and what the card does not move."""
    checksum_s = min(model.seconds["bytes"], machine["xxh3_s_per_byte"]) if model.operation in CHECKSUMMED else 0.0
    moved_s = model.seconds["bytes"] - checksum_s
    return moved_s * (1 - assumed.nic_share) + checksum_s * (1 - assumed.checksum_engine)


def lookups_per_core(model: Fit, assumed: Assumptions, batch: int) -> float:
    """Keys a second of one core, wholly busy, `batch` keys a capsule."""
    return assumed.core_ratio / _own_s(model, assumed, batch)


def _own_s(model: Fit, assumed: Assumptions, batch: int) -> float:
    """Fixed cost and cost per block, of one block."""
    own_s = model.seconds["capsules"] / batch + model.seconds["blocks"]
    user_s = own_s * (1 - model.kernel_share) * (1 - assumed.native_share * (1 - 1 / assumed.native_speedup))
    return user_s + own_s * model.kernel_share * assumed.kernel_share


def variants(assumed: Assumptions) -> Iterator[tuple[str, Assumptions]]:
    """One assumption changed at a time: what the answer hangs on."""
    yield "as assumed", assumed
    yield "cores half as fast", dataclasses.replace(assumed, core_ratio=assumed.core_ratio / 2)
    yield "checksums by an engine", dataclasses.replace(assumed, checksum_engine=1.0)
    yield "bytes moved by cores, as here", dataclasses.replace(assumed, nic_share=0.0)
    yield "no kernel in the way (SPDK, polled queues)", dataclasses.replace(assumed, kernel_share=0.0)
    yield "nine tenths of the code native", dataclasses.replace(assumed, native_share=0.9)
    yield "both", dataclasses.replace(assumed, kernel_share=0.0, native_share=0.9)
    yield "a block in 32 pieces", dataclasses.replace(assumed, pieces=32.0)
