"""A region's counters, by the numbers of `common.wire.StatId`. Gauges are asked of their owners when read."""

from __future__ import annotations

from common.wire import StatId

_SIZE = max(StatId) + 1


class Stats:
    def __init__(self) -> None:
        self._values = [0] * _SIZE

    def add(self, stat: StatId, amount: int = 1) -> None:
        self._values[stat] += amount

    def set(self, stat: StatId, value: int) -> None:
        self._values[stat] = value

    def get(self, stat: StatId) -> int:
        return self._values[stat]

    def snapshot(self) -> dict[StatId, int]:
        return {stat: self._values[stat] for stat in StatId}
