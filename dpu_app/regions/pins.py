"""Which slots are pinned, and until when. Every step takes the same time however many there are.

Pins are kept by the second in which they end, so that nothing ever looks through all of them. Owned by the catalogue.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000
EXPIRE_MAX = 512
"""Pins that end in one call of `expire`, at most: in a quarter of a millisecond."""
SECONDS_MAX = 1024
"""Seconds that one call looks at."""


class Pins:
    """Times are monotonic, in ns. `pins_max` slots at most."""

    def __init__(self, pins_max: int, now_ns: int) -> None:
        self._pins_max = pins_max
        self._until: dict[int, int] = {}
        self._by_second: dict[int, set[int]] = {}
        """Slots by the second at whose beginning their pin has ended."""
        self._expired_s = now_ns // NS_PER_S
        """All seconds up to this one are empty."""

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, slot: int) -> bool:
        return slot in self._until

    def holds(self, slot: int, now_ns: int) -> bool:
        until = self._until.get(slot)
        return until is not None and until > now_ns

    def pin(self, slot: int, now_ns: int, ttl_s: int) -> bool:
        """Until `ttl_s` from now, or longer where it is pinned for longer. False when as many are pinned as may be."""
        before = self._until.get(slot)
        if before is None and len(self._until) >= self._pins_max:
            self.expire(now_ns, 1)
            if len(self._until) >= self._pins_max:
                return False
        until = now_ns + ttl_s * NS_PER_S
        if before is not None:
            if before >= until:
                return True
            self._leave(slot, before)
        self._until[slot] = until
        self._by_second.setdefault(_second(until), set()).add(slot)
        return True

    def unpin(self, slot: int) -> None:
        """Nothing happens where it is not pinned."""
        until = self._until.pop(slot, None)
        if until is not None:
            self._leave(slot, until)

    def expire(self, now_ns: int, limit: int = EXPIRE_MAX) -> None:
        """Drop pins that have ended, at most `limit`: the rest in the next call."""
        last = min(now_ns // NS_PER_S, self._expired_s + SECONDS_MAX)
        while self._expired_s < last:
            ended = self._by_second.get(self._expired_s + 1)
            while ended and limit:
                del self._until[ended.pop()]
                limit -= 1
            if ended:
                return
            self._by_second.pop(self._expired_s + 1, None)
            self._expired_s += 1

    def _leave(self, slot: int, until: int) -> None:
        second = _second(until)
        slots = self._by_second[second]
        slots.discard(slot)
        if not slots:
            del self._by_second[second]


def _second(until_ns: int) -> int:
    return -(-until_ns // NS_PER_S)
