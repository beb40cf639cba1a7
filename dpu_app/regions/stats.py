"""A region's counters, by the numbers of `common.wire.StatId`. Gauges are asked of their owners when read."""

from __future__ import annotations

from array import array

from common.wire import StatId

_SIZE = max(StatId) + 1


class Stats:
    def __init__(self) -> None:
        self.values = array("q", bytes(8 * _SIZE))
        """By number; the native hot path counts here, too."""

    def add(self, stat: StatId, amount: int = 1) -> None:
        self.values[stat] += amount

    def set(self, stat: StatId, value: int) -> None:
        self.values[stat] = value

    def get(self, stat: StatId) -> int:
        return self.values[stat]

    def snapshot(self) -> dict[StatId, int]:
        return {stat: self.values[stat] for stat in StatId}
