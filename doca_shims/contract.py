"""The fabric's contract, executable: the same checks for the emulator, for soft-RoCE and for a real card.

Free of any test framework, so that a command can run it in the field: `run_all` never raises for a check that
fails, and says what happened. `CHECKS` is the explicit list; each check takes a `FabricHarness` and needs nothing
else. A check that wants what the backend's caps do not offer is skipped.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from doca_shims import contract_batch, contract_data, contract_misuse, contract_peers, contract_polling
from doca_shims.contract_harness import ContractViolationError, FabricHarness, SkippedError

__all__ = ["CHECKS", "CheckResult", "ContractViolationError", "FabricHarness", "SkippedError", "run_all", "run_check"]

Check = Callable[[FabricHarness], None]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for module in (contract_data, contract_batch, contract_polling, contract_misuse, contract_peers)
    for check in module.CHECKS
}


@dataclass(frozen=True)
class CheckResult:
    name: str
    outcome: str
    """passed, failed or skipped."""
    detail: str
    """Why it failed or was skipped."""
    duration_s: float


def run_check(name: str, harness: FabricHarness) -> CheckResult:
    """Run one check of `CHECKS`."""
    started_s = time.monotonic()
    outcome, detail = "passed", ""
    try:
        CHECKS[name](harness)
    except SkippedError as error:
        outcome, detail = "skipped", str(error)
    except ContractViolationError as error:
        outcome, detail = "failed", str(error)
    except Exception:  # noqa: BLE001  the other checks still have to run, and this one's trace is its result
        outcome, detail = "failed", traceback.format_exc()
    return CheckResult(name, outcome, detail, time.monotonic() - started_s)


def run_all(harness: FabricHarness) -> list[CheckResult]:
    """Run every check, in the order of `CHECKS`."""
    return [run_check(name, harness) for name in CHECKS]
