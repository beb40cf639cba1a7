"""What a region worker's log says of flash that fails.

A block that flash would not take is dropped, which agents see as a miss and nothing else; the operator has to hear why.
Called by `dpu_app.region_server` for every completion.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from doca_shims.api import FlashCompletion

PAUSE_NS = 10_000_000_000
"""Between two lines, however many requests fail."""
_LOG = logging.getLogger(__name__)


class FlashErrorLog:
    """Of one region."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._untold = 0
        self._next_ns = 0

    def note(self, completions: Sequence[FlashCompletion], now_ns: int) -> None:
        """The first failure is told at once; later ones are counted, and told when a pause is over."""
        failed = [completion.result for completion in completions if completion.result < 0]
        if not failed:
            return
        self._untold += len(failed)
        if now_ns >= self._next_ns:
            _LOG.error(
                "flash fails: %s", os.strerror(-failed[-1]), extra={"region": self._region, "requests": self._untold}
            )
            self._untold = 0
            self._next_ns = now_ns + PAUSE_NS
