"""The goals of speed held against a benchmark's report: what was measured, met or missed, and why missed.

Goals and reasons are data (`goals.yaml`); nothing is measured here. Goals against peers are another report's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common import config
from common.config import SizeBytes
from host_agent.bench.tables import Column, Table

GOALS_FILE: Final = Path(__file__).with_name("goals.yaml")
MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
_NO_REASON: Final = "no reason is known yet"


@dataclass(frozen=True)
class CellName:
    """Which cell of the report, and what of it: its ratio to `limit`, or its rate."""

    target: str
    operation: str
    batch: int
    block_bytes: SizeBytes = 0
    limit: str = ""
    figure: str = ""


@dataclass(frozen=True)
class Goal:
    """`at_least` or `at_most` is set; `cell` or `measure` names the figure."""

    key: str
    work: str
    goal: str
    cell: CellName | None = None
    measure: str = ""
    at_least: float | None = None
    at_most: float | None = None
    reason: str = ""

    def is_met(self, value: float) -> bool:
        enough = self.at_least is None or value >= self.at_least
        return enough and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True)
class Goals:
    """The whole file."""

    goals: tuple[Goal, ...]


def load_goals(path: Path = GOALS_FILE) -> tuple[Goal, ...]:
    """In the file's order. Raises UserError."""
    return config.load_file(path, Goals).goals


def evaluate(goals: Sequence[Goal], document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each goal, for JSON. `measured`: figures as `spread` gives them, empty where there are none."""
    lines: list[dict[str, Any]] = []
    for goal in goals:
        figures = _figures(goal, document)
        if not figures:
            outcome = NOT_MEASURED
        else:
            outcome = MET if goal.is_met(figures["median"]) else MISSED
        reason = (goal.reason or _NO_REASON) if outcome == MISSED else ""
        lines.append(
            {
                "key": goal.key,
                "work": goal.work,
                "goal": goal.goal,
                "measured": figures,
                "outcome": outcome,
                "reason": reason,
            }
        )
    return lines


def goals_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """For people: what `evaluate` found."""
    columns = [Column(name, words=True) for name in ("work", "goal", "measured", "outcome", "reason if missed")]
    table = Table("Goals", columns)
    for line in lines:
        figures = line["measured"]
        measured = "-"
        if figures:
            measured = f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"
        table.add(line["work"], line["goal"], measured, line["outcome"], line["reason"])
    table.notes.append("measured: median of the rounds, with the lowest and the highest; the median decides.")
    return table


def _figures(goal: Goal, document: Mapping[str, Any]) -> dict[str, Any]:
    if goal.cell is None:
        figures: dict[str, Any] = document.get("region", {}).get(goal.measure, {})
        return figures
    name = goal.cell
    wanted = (name.target, name.operation, name.block_bytes, name.batch)
    for cell in document["cells"]:
        if (cell["target"], cell["operation"], cell["block_bytes"], cell["batch"]) == wanted:
            found: dict[str, Any] = cell["of"].get(name.limit, {}) if name.limit else cell[name.figure]
            return found
    return {}
