"""Goals against a report: met, missed with a reason, or not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from emulator.goals import MET, MISSED, NOT_MEASURED, CellName, Goal, evaluate, goals_table, load_goals
from host_agent.bench.settings import OPERATIONS

CELL = CellName("emu-shm", "retrieve_staged", 16, 1 << 20, limit="memmove")


def _document(ratio: float) -> dict[str, Any]:
    of = {"memmove": {"median": ratio, "min": 0.1, "max": 2.0}}
    cell = {"target": "emu-shm", "operation": "retrieve_staged", "block_bytes": 1 << 20, "batch": 16, "of": of}
    return {"cells": [{**cell, "batch": 1, "of": {}}, cell], "region": {"ratio": {"median": 2.5}}}


@pytest.mark.parametrize(("ratio", "outcome"), [(0.9, MET), (0.89, MISSED)])
def test_the_median_decides(ratio: float, outcome: str) -> None:
    (line,) = evaluate([Goal("key", "work", "goal", CELL, at_least=0.9, reason="because")], _document(ratio))
    assert line["outcome"] == outcome
    assert line["reason"] == ("because" if outcome == MISSED else "")


def test_the_most_allowed_and_what_was_not_measured() -> None:
    goals = [
        Goal("a", "restart", "at most 2", measure="ratio", at_most=2.0),
        Goal("b", "memory", "at most 64", measure="bytes_per_slot", at_most=64.0),
        Goal("c", "other", "goal", CellName("emu-tcp", "lookup", 512, figure="rate"), at_least=3.0),
    ]
    lines = evaluate(goals, _document(1.0))
    assert [line["outcome"] for line in lines] == [MISSED, NOT_MEASURED, NOT_MEASURED]
    assert lines[0]["reason"] == "no reason is known yet"
    lines[0]["measured"] = {"median": 2.5, "min": 2.0, "max": 3.0}
    assert "| 2.50 (2.00 to 3.00) | missed | no reason" in goals_table(lines).markdown()


def test_the_goals_of_the_file_can_be_measured() -> None:
    goals = load_goals()
    assert len({goal.key for goal in goals}) == len(goals) == 10
    for goal in goals:
        assert (goal.at_least is None) != (goal.at_most is None)
        assert (goal.cell is None) != (goal.measure == "")
        if goal.cell is not None:
            assert goal.cell.operation in OPERATIONS
            assert goal.cell.limit or goal.cell.figure == "rate"


def test_a_mistake_in_the_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "goals.yaml"
    path.write_text("goals:\n  - key: a\n    work: b\n    goals: c\n")
    with pytest.raises(UserError, match=r"goals\.yaml:4"):
        load_goals(path)
