"""Failing flash is in the log: at once, with its reason, and not once for each request."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from doca_shims.api import FlashCompletion
from dpu_app.flash_errors import PAUSE_NS, FlashErrorLog

FULL = FlashCompletion(1, -errno.ENOSPC)
WELL = FlashCompletion(2, 4096)


def test_the_first_failure_is_told_and_the_rest_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = FlashErrorLog("r0")
    log.note([WELL], 5)
    assert caplog.records == []
    log.note([WELL, FULL, FULL], 10)
    log.note([FULL], 11)
    log.note([FULL], 9 + PAUSE_NS)
    log.note([FULL, WELL], 10 + PAUSE_NS)
    told: list[Any] = caplog.records
    assert [(record.getMessage(), record.region, record.requests) for record in told] == [
        ("flash fails: No space left on device", "r0", 2),
        ("flash fails: No space left on device", "r0", 3),
    ]
