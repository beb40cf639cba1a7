"""A memory copy as a limit: every block is copied, and nothing beyond."""

from __future__ import annotations

import pytest

from host_agent.bench.limits import LIMITS_OF, memmove_s
from host_agent.bench.report import TITLES


def test_memmove_copies_every_block() -> None:
    source, destination = bytearray(range(256)) * 16, bytearray(4096)
    assert memmove_s(memoryview(destination), memoryview(source), 1024, 3) > 0
    assert destination == source[:3072] + bytes(1024)
    with pytest.raises(ValueError, match="do not fit"):
        memmove_s(memoryview(destination), memoryview(source), 1024, 5)


def test_every_operation_has_a_title() -> None:
    assert set(LIMITS_OF) == set(TITLES)
