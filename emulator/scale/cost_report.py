"""The cost model for people: fitted costs, what a DPU would need, and every assumption with its source, as tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from common.errors import UserError
from common.units import format_size
from emulator.scale.cost_model import (
    Assumptions,
    Fit,
    dpu_byte_s,
    fits,
    lookups_per_core,
    need,
    variants,
)
from host_agent.bench.tables import Column, Table

BLOCK_BYTES: Final = (64 << 10, 256 << 10, 1 << 20)
BATCHES: Final = (1, 16, 128)
LOOKUP_BATCHES: Final = (16, 512)
_TITLES: Final = {
    "retrieve": "RETRIEVE staged",
    "retrieve_cold": "RETRIEVE cold",
    "store": "STORE to flash",
    "lookup": "LOOKUP",
}
CAUTION: Final = (
    "Extrapolated from the emulator on the machine named above: what a DPU would need if the assumptions held. Not a "
    "measurement of one, and not the product's performance."
)


def samples_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of several reports of bench-scale together, and the lowest of what they say the machine's copies and
    checksums cost. Raises UserError for a report without any."""
    rows: list[Mapping[str, Any]] = []
    machine: dict[str, float] = {}
    shares: dict[str, list[float]] = {}
    for report in reports:
        samples = report.get("samples")
        if not isinstance(samples, Mapping) or not samples.get("rows"):
            raise UserError("a report without samples: the cost model takes scale.json of 'entresol-emu bench-scale'")
        rows += samples["rows"]
        for name, value in samples["machine"].items():
            machine[name] = min(machine.get(name, value), value)
        for name, value in samples.get("kernel_share", {}).items():
            shares.setdefault(name, []).append(value)
    kernel = {name: statistics.fmean(values) for name, values in shares.items()}
    return {"rows": rows, "machine": machine, "kernel_share": kernel}


def cost_tables(
    samples: Mapping[str, Any], assumed: Assumptions, block_bytes: Sequence[int], batches: Sequence[int]
) -> list[Table]:
    """Raises UserError where the samples do not carry a fit."""
    models = fits(samples)
    machine = samples["machine"]
    found = [_fits(models, machine), _needs(models, machine, assumed, block_bytes, batches)]
    if "lookup" in models:
        found.append(_lookups(models["lookup"], assumed))
    found += [_variants(models, machine, assumed, block_bytes, batches), _assumptions(assumed)]
    return found


def as_dict(
    samples: Mapping[str, Any], assumed: Assumptions, block_bytes: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    """For JSON."""
    models = fits(samples)
    moving = [model for name, model in models.items() if name != "lookup"]
    return {
        "caution": CAUTION,
        "fits": {name: dataclasses.asdict(model) for name, model in models.items()},
        "machine": dict(samples["machine"]),
        "assumptions": {
            item.name: {"value": getattr(assumed, item.name), **item.metadata} for item in dataclasses.fields(assumed)
        },
        "needs": [
            dataclasses.asdict(need(model, samples["machine"], assumed, size, batch))
            for model in moving
            for size in block_bytes
            for batch in batches
        ],
        "lookups_per_core": {str(batch): lookups_per_core(models["lookup"], assumed, batch) for batch in LOOKUP_BATCHES}
        if "lookup" in models
        else {},
    }


def _fits(models: Mapping[str, Fit], machine: Mapping[str, float]) -> Table:
    columns = [Column("operation", words=True), Column("capsule us"), Column("block us"), Column("byte ns")]
    columns += [
        Column("in the kernel"),
        Column("R2"),
        Column("residual, median"),
        Column("largest"),
        Column("samples", detail=True),
    ]
    table = Table("Measured: processor time of a region worker in the emulator", columns)
    for name, model in models.items():
        table.add(
            _TITLES.get(name, name),
            f"{model.seconds['capsules'] * 1e6:.1f}",
            f"{model.seconds['blocks'] * 1e6:.2f}",
            f"{model.seconds['bytes'] * 1e9:.4f}",
            f"{model.kernel_share:.0%}",
            f"{model.r_squared:.3f}",
            f"{model.residual_median:.0%}",
            f"{model.residual_max:.0%}",
            str(model.rows),
        )
    table.notes.append(
        f"Of the same machine in the same run: a byte of XXH3 {machine['xxh3_s_per_byte'] * 1e9:.4f} ns, a byte copied "
        f"{machine['copy_s_per_byte'] * 1e9:.4f} ns"
        + (f"; clock {machine['clock_mhz']:.0f} MHz." if machine.get("clock_mhz") else ".")
    )
    return table


def _needs(
    models: Mapping[str, Fit],
    machine: Mapping[str, float],
    assumed: Assumptions,
    block_bytes: Sequence[int],
    batches: Sequence[int],
) -> Table:
    columns = [Column("operation", words=True), Column("block"), Column("blocks a capsule"), Column("us here")]
    columns += [Column("us on a DPU core"), Column("cycles", detail=True), Column("of that, bytes", detail=True)]
    columns += [
        Column("M blocks/s", detail=True),
        Column("cores"),
        Column("of all"),
        Column("GB/s a core", detail=True),
    ]
    table = Table(f"To carry {assumed.line_gbit_per_s:g} Gb/s", columns)
    clock_mhz = machine.get("clock_mhz", 0.0)
    for name, model in models.items():
        if name == "lookup":
            continue
        for size in block_bytes:
            for batch in batches:
                row = need(model, machine, assumed, size, batch)
                table.add(
                    _TITLES.get(name, name),
                    format_size(size),
                    str(batch),
                    f"{row.measured_us:.1f}",
                    f"{row.block_us:.1f}",
                    f"{row.block_us * assumed.core_ratio * clock_mhz:.0f}" if clock_mhz else "-",
                    f"{row.per_byte_ns * size / 1e3 / row.block_us:.0%}",
                    f"{row.blocks_per_s / 1e6:.2f}",
                    f"{row.cores:.1f}",
                    f"{row.cores / assumed.cores:.0%}",
                    f"{row.core_gb_per_s:.1f}",
                )
    table.notes.append("cycles: of a core like those measured on. us here: with the emulator's copies.")
    table.notes.append(CAUTION)
    return table


def _lookups(model: Fit, assumed: Assumptions) -> Table:
    columns = [Column("keys a capsule"), Column("M keys/s a core"), Column("M keys/s of all cores")]
    table = Table("LOOKUP", columns)
    for batch in LOOKUP_BATCHES:
        rate = lookups_per_core(model, assumed, batch) / 1e6
        table.add(str(batch), f"{rate:.2f}", f"{rate * assumed.cores * assumed.core_busy:.1f}")
    return table


def _variants(
    models: Mapping[str, Fit],
    machine: Mapping[str, float],
    assumed: Assumptions,
    block_bytes: Sequence[int],
    batches: Sequence[int],
) -> Table:
    moving = {name: model for name, model in models.items() if name != "lookup"}
    size, batch = block_bytes[len(block_bytes) // 2], batches[len(batches) // 2]
    columns = [Column("assumption", words=True)]
    columns += [Column(f"{_TITLES.get(name, name)}: cores") for name in moving]
    table = Table(f"What the answer hangs on: {format_size(size)}, {batch} blocks a capsule", columns)
    for name, changed in variants(assumed):
        table.add(name, *(f"{need(model, machine, changed, size, batch).cores:.1f}" for model in moving.values()))
    ns = {name: dpu_byte_s(model, machine, assumed) * 1e9 for name, model in moving.items()}
    said = ", ".join(f"{_TITLES.get(name, name)} {value:.4f} ns" for name, value in ns.items())
    table.notes.append(f"A byte costs a core, as assumed: {said}.")
    return table


def _assumptions(assumed: Assumptions) -> Table:
    columns = [Column("assumption", words=True), Column("value"), Column("unit", words=True)]
    table = Table("Assumptions, each an option", [*columns, Column("source", words=True)])
    for item in dataclasses.fields(assumed):
        option = "--" + item.name.replace("_", "-")
        table.add(option, f"{getattr(assumed, item.name):g}", item.metadata["unit"], item.metadata["source"])
    return table
