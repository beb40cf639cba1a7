"""When to try again: pauses that double up to a bound, with jitter, and an end where one is configured.

Pure arithmetic on times that the caller passes; used by `host_agent.session` for DPUs and for regions.
"""

from __future__ import annotations

import random

from host_agent.config import ReconnectSettings

NS_PER_S = 1_000_000_000


class Backoff:
    """Times are of the monotonic clock, in ns."""

    def __init__(self, settings: ReconnectSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._pause_s = settings.pause_first_s
        self._failing_since_ns: int | None = None
        self.due_ns: int | None = 0
        """When the next attempt is due; None: given up."""

    def succeeded(self) -> None:
        self._pause_s = self._settings.pause_first_s
        self._failing_since_ns = None
        self.due_ns = 0

    def failed(self, now_ns: int) -> None:
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns
        give_up_ns = self._settings.give_up_s * NS_PER_S
        if give_up_ns and now_ns - self._failing_since_ns >= give_up_ns:
            self.due_ns = None
            return
        pause_s = self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, self._settings.pause_max_s)
        self.due_ns = now_ns + int(pause_s * NS_PER_S)

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and self.due_ns <= now_ns
