"""Fewer rounds where time runs out, never none."""

from __future__ import annotations

from host_agent.bench.pace import Pace


def _run(round_s: list[float], limit_s: float, asked: int = 5) -> tuple[list[int], int]:
    """Rounds that parts of one weight each get, whose rounds take so long."""
    now = [100.0]
    pace = Pace(len(round_s), limit_s, lambda: now[0])
    counts = []
    for seconds in round_s:
        count = 0
        for _number in pace.rounds(asked, 1.0):
            now[0] += seconds
            count += 1
        counts.append(count)
    return counts, pace.shortened


def test_in_time_all_rounds_are_run() -> None:
    assert _run([1, 1, 1], limit_s=16) == ([5, 5, 5], 0)


def test_a_slow_part_has_three_and_later_ones_catch_up() -> None:
    assert _run([2, 1, 1], limit_s=18) == ([3, 5, 5], 1)
    assert _run([100, 100], limit_s=1) == ([3, 3], 2)


def test_fewer_than_three_are_never_cut_and_without_a_limit_none() -> None:
    assert _run([100, 100], limit_s=1, asked=2) == ([2, 2], 0)
    assert _run([100, 100], limit_s=0) == ([5, 5], 0)
