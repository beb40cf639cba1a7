"""The real clock, for composition roots to pass in. Nothing else in the product reads the time itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doca_shims.api import Clock


class SystemClock:
    """CLOCK_MONOTONIC and CLOCK_REALTIME."""

    # The functions themselves: a method around them would cost another call, several times in each capsule.
    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


if TYPE_CHECKING:
    _conforms: Clock = SystemClock()
