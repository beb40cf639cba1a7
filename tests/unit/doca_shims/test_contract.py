"""The contract's runner: it names every check, survives the ones that fail, and says why."""

from __future__ import annotations

import pytest

from doca_shims import contract, contract_batch, contract_data, contract_misuse, contract_peers, contract_polling
from doca_shims.contract_harness import FabricHarness, expect
from emulator import fabric_shm

_HARNESS = FabricHarness("none", {}, lambda: fabric_shm.create({}), lambda: "", 1.0)


def _passes(harness: FabricHarness) -> None:
    expect(harness is _HARNESS, "the harness is passed on")


def _fails(harness: FabricHarness) -> None:
    expect(False, "two and two is five")


def _breaks(harness: FabricHarness) -> None:
    raise ZeroDivisionError


def _skips(harness: FabricHarness) -> None:
    raise contract.SkippedError("no teapot")


def test_every_check_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {check.__name__: check for check in (_passes, _fails, _breaks, _skips)}
    monkeypatch.setattr(contract, "CHECKS", checks)
    results = contract.run_all(_HARNESS)
    assert [(result.name, result.outcome) for result in results] == [
        ("_passes", "passed"),
        ("_fails", "failed"),
        ("_breaks", "failed"),
        ("_skips", "skipped"),
    ]
    assert results[1].detail == "two and two is five"
    assert "ZeroDivisionError" in results[2].detail
    assert results[3].detail == "no teapot"


def test_no_two_checks_share_a_name_and_each_says_what_it_checks() -> None:
    modules = (contract_data, contract_batch, contract_polling, contract_misuse, contract_peers)
    assert len(contract.CHECKS) == sum(len(module.CHECKS) for module in modules)
    assert all(check.__doc__ for check in contract.CHECKS.values())
