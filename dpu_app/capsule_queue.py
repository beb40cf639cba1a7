"""Request capsules that a turn of the region server's loop leaves to the next: a turn handles a bounded number of bytes
of them, and agents take turns, however many requests one of them has sent.

An agent may have a capsule of 512 stores for each of its credits on the way, 7 ms of work each. Used by the region
server's loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

TURN_BYTES = 32 << 10
"""Capsules' bytes that a turn begins to handle, 64 for each block that is stored or retrieved, 24 for a key."""


class CapsuleQueue:
    def __init__(self) -> None:
        self._waiting: dict[int, deque[bytes]] = {}
        """By connection; whose turn is next is the first."""
        self._left = 0

    def __len__(self) -> int:
        """Connections with capsules that wait."""
        return len(self._waiting)

    def __contains__(self, connection_id: int) -> bool:
        return connection_id in self._waiting

    def begin_turn(self) -> None:
        self._left = TURN_BYTES

    def end_turn(self) -> None:
        """Nothing more is begun in this turn."""
        self._left = 0

    def take(self, connection_id: int, capsules: Sequence[memoryview]) -> Iterator[memoryview]:
        """Those of `capsules`, which have just come, to handle now, one by one. The others are copied and wait."""
        waiting = self._waiting.get(connection_id)
        if waiting is not None:
            waiting.extend(map(bytes, capsules))
            return
        for place, capsule in enumerate(capsules):
            if self._left <= 0:
                self._waiting[connection_id] = deque(map(bytes, capsules[place:]))
                return
            self._left -= len(capsule)
            yield capsule

    def next(self) -> Iterator[tuple[int, bytes]]:
        """What waits, one capsule of each connection in turn, as far as this turn goes."""
        while self._waiting and self._left > 0:
            connection_id, waiting = next(iter(self._waiting.items()))
            capsule = waiting.popleft()
            del self._waiting[connection_id]
            if waiting:
                self._waiting[connection_id] = waiting  # behind the others
            self._left -= len(capsule)
            yield connection_id, capsule

    def drop(self, connection_id: int) -> None:
        """The connection is gone."""
        self._waiting.pop(connection_id, None)
