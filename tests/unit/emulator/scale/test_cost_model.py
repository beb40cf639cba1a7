"""The cost model finds the costs that samples were made of, and says what follows from its assumptions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from emulator.scale.cost_model import TERMS, Assumptions, Fit, dpu_byte_s, fit, lookups_per_core, need, variants
from emulator.scale.cost_report import as_dict, cost_tables, samples_of

CAPSULE_S, BLOCK_S, BYTE_S = 120e-6, 7e-6, 0.08e-9
MACHINE = {"xxh3_s_per_byte": 0.03e-9, "copy_s_per_byte": 0.07e-9, "clock_mhz": 2600.0}
SIZES = [(size, batch) for size in (4 << 10, 64 << 10, 256 << 10) for batch in (1, 4, 16, 128)]


def _row(operation: str, size: int, batch: int, cpu_s: float) -> dict[str, Any]:
    return {"operation": operation, "capsules": 1.0, "blocks": batch, "bytes": size * batch, "cpu_s": cpu_s}


def _rows(operation: str = "retrieve", noise: float = 0.0) -> list[dict[str, Any]]:
    random = np.random.default_rng(3)
    return [
        _row(
            operation,
            size,
            batch,
            (CAPSULE_S + batch * BLOCK_S + size * batch * BYTE_S) * float(1 + noise * random.uniform(-1, 1)),
        )
        for size, batch in SIZES
    ]


def _fit(operation: str = "retrieve", capsule_s: float = 0.0, block_s: float = 0.0, byte_s: float = 0.0) -> Fit:
    return Fit(operation, dict(zip(TERMS, (capsule_s, block_s, byte_s))), 1.0, 0.0, 0.0, 12)


def test_the_costs_that_samples_were_made_of_are_found() -> None:
    found = fit("retrieve", _rows())
    assert [found.seconds[term] for term in TERMS] == pytest.approx([CAPSULE_S, BLOCK_S, BYTE_S], rel=1e-6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.residual_max < 1e-6
    assert found.of(2, 3, 1000) == pytest.approx(2 * CAPSULE_S + 3 * BLOCK_S + 1000 * BYTE_S)


def test_noise_shows_in_the_residuals_and_hardly_moves_the_costs() -> None:
    found = fit("retrieve", _rows(noise=0.1))
    assert [found.seconds[term] for term in TERMS] == pytest.approx([CAPSULE_S, BLOCK_S, BYTE_S], rel=0.15)
    assert 0.01 < found.residual_median < found.residual_max < 0.25


def test_no_cost_is_below_zero() -> None:
    rows = [_row("retrieve", size, batch, batch * BLOCK_S / (1 + size / (1 << 20))) for size, batch in SIZES]
    found = fit("retrieve", rows)
    assert all(found.seconds[term] >= 0 for term in TERMS)
    assert found.seconds["bytes"] == 0


def test_a_lookup_has_no_bytes() -> None:
    found = fit("lookup", [_row("lookup", 0, batch, CAPSULE_S + batch * 0.3e-6) for batch in (1, 16, 128, 512)])
    assert found.seconds["blocks"] == pytest.approx(0.3e-6)
    assert found.seconds["bytes"] == 0


@pytest.mark.parametrize(
    "rows",
    [_rows()[:3], [_row("retrieve", 4096, batch, batch * BLOCK_S) for batch in (1, 2, 4, 8, 16)]],
    ids=["too few", "one size only"],
)
def test_samples_that_cannot_tell_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="samples"):
        fit("retrieve", rows)


def test_cores_for_the_line_by_hand() -> None:
    """100 GB/s in blocks of 1 MB, 10 us each of a core that is half busy: 100,000 blocks/s, so two cores' worth."""
    assumed = Assumptions(core_busy=0.5, post_us=0.0)
    row = need(_fit(capsule_s=80e-6, block_s=5e-6, byte_s=BYTE_S), MACHINE, assumed, 1_000_000, 16)
    assert row.block_us == pytest.approx(10.0)
    assert row.blocks_per_s == pytest.approx(100_000)
    assert row.cores == pytest.approx(2.0)
    assert row.core_gb_per_s == pytest.approx(100)
    assert row.measured_us == pytest.approx(10 + 80), "here the emulator's copies count"


@pytest.mark.parametrize(
    ("operation", "changes", "expected"),
    [
        ("retrieve", {}, 0.0),
        ("retrieve", {"nic_share": 0.25}, 0.75 * BYTE_S),
        ("store", {}, MACHINE["xxh3_s_per_byte"]),
        ("store", {"checksum_engine": 1.0}, 0.0),
        ("store", {"nic_share": 0.0, "checksum_engine": 1.0}, BYTE_S - MACHINE["xxh3_s_per_byte"]),
        ("retrieve_cold", {"nic_share": 0.0}, BYTE_S),
    ],
)
def test_what_a_byte_costs(operation: str, changes: dict[str, float], expected: float) -> None:
    found = dpu_byte_s(_fit(operation, byte_s=BYTE_S), MACHINE, Assumptions(**changes))
    assert found == pytest.approx(expected)


def test_faster_cores_native_code_and_pieces() -> None:
    model = _fit(capsule_s=100e-6, block_s=10e-6)
    base = Assumptions(post_us=0.5)

    def us(**changes: float) -> float:
        return need(model, MACHINE, dataclasses.replace(base, **changes), 1 << 16, 10).block_us

    assert us() == pytest.approx(20.5)
    assert us(core_ratio=2.0) == pytest.approx(10.5)
    assert us(native_share=0.5, native_speedup=10.0) == pytest.approx(20 * 0.55 + 0.5)
    assert us(pieces=4.0) == pytest.approx(22.0)
    assert lookups_per_core(model, base, 10) == pytest.approx(50_000)


def test_without_the_kernel_what_it_took_is_gone_and_the_rest_is_not() -> None:
    model = dataclasses.replace(_fit("store", capsule_s=100e-6, block_s=10e-6), kernel_share=0.4)

    def us(**changes: float) -> float:
        return need(model, MACHINE, Assumptions(post_us=0.0, **changes), 1 << 16, 10).block_us

    assert us() == pytest.approx(20.0)
    assert us(kernel_share=0.0) == pytest.approx(12.0)
    assert us(kernel_share=0.5) == pytest.approx(16.0)
    assert us(kernel_share=0.5, native_share=1.0, native_speedup=4.0) == pytest.approx(12 / 4 + 4)


@pytest.mark.parametrize(
    "changes", [{"nic_share": 1.1}, {"core_ratio": 0}, {"core_busy": 1.5}, {"post_us": -1}, {"native_share": -0.1}]
)
def test_assumptions_that_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Assumptions(**changes)


def test_every_assumption_names_unit_and_source() -> None:
    for item in dataclasses.fields(Assumptions):
        assert item.metadata["unit"], item.name
        assert len(item.metadata["source"]) > 10, item.name
    assert len({name for name, _ in variants(Assumptions())}) > 3


def _report() -> dict[str, Any]:
    lookups = [_row("lookup", 0, batch, CAPSULE_S + batch * 0.3e-6) for batch in (1, 16, 128, 512)]
    return {"samples": {"rows": [*_rows(), *_rows("store"), *lookups], "machine": MACHINE}}


def test_tables_and_json_say_what_was_fitted_and_that_it_is_no_measurement() -> None:
    samples = samples_of([_report(), _report()])
    tables = cost_tables(samples, Assumptions(core_ratio=0.8), (64 << 10, 1 << 20), (16, 128))
    text = "\n".join(table.markdown() for table in tables)
    for word in ("120.0", "7.00", "0.0800", "--core-ratio", "0.8", "RETRIEVE staged", "Not a measurement", "2600 MHz"):
        assert word in text
    document = as_dict(samples, Assumptions(), (64 << 10,), (16,))
    assert document["fits"]["retrieve"]["seconds"]["blocks"] == pytest.approx(BLOCK_S)
    assert [row["operation"] for row in document["needs"]] == ["retrieve", "store"]
    assert document["assumptions"]["cores"]["value"] == 64


def test_a_report_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match="without samples"):
        samples_of([_report(), {"cells": []}])
