"""Blocking transfers: what is read in which pieces, what a fault looks like, and that no wait is for ever."""

from __future__ import annotations

import errno
import random

import pytest

from common.errors import DeadlineError, LowerLayerError
from doca_shims.api import FlashCompletion, FlashOp
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions.blocking_flash import BlockingFlash, problem_of
from tests.unit.dpu_app.regions.memory_flash import MemoryFlash, blank_flash


@pytest.mark.parametrize("length_bytes", [4096, 1 << 20, (5 << 20) + 8192])
def test_a_range_is_read_whole_whatever_the_order(length_bytes: int) -> None:
    flash, memory = blank_flash(8 << 20)
    flash.content[:] = random.Random(1).randbytes(8 << 20)
    found = bytearray(8 << 20)
    for block in BlockingFlash(flash, memory).read_blocks(4096, length_bytes):
        assert block.problem is None
        found[block.offset_bytes : block.offset_bytes + block.length_bytes] = block.view(memory)
    assert found[4096 : 4096 + length_bytes] == flash.content[4096 : 4096 + length_bytes]
    assert not any(found[4096 + length_bytes :])


def test_zeros_go_exactly_where_they_should() -> None:
    flash, memory = blank_flash(8 << 20)
    flash.content[:] = b"\xff" * (8 << 20)
    BlockingFlash(flash, memory).write_zeros(8192, (3 << 20) + 4096)
    assert flash.content.count(0) == (3 << 20) + 4096
    assert not any(flash.content[8192 : 8192 + (3 << 20) + 4096])


def test_a_device_that_completes_nothing_is_given_up() -> None:
    class Silent(MemoryFlash):
        def poll(self) -> list[FlashCompletion]:
            return []

    flash, memory = Silent(8 << 20), AnonymousMemory(1 << 20)
    flash.register_memory(memory)
    waits: list[float] = []

    def wait(device: object, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    with pytest.raises(DeadlineError):
        list(BlockingFlash(flash, memory, wait, timeout_s=7.0).read_blocks(0, 4096))
    assert waits == [7.0]


def test_faults_are_told_per_piece() -> None:
    flash, memory = blank_flash(8 << 20)
    flash.faults = lambda request: -errno.EIO if request.offset_bytes == 1 << 20 else None
    blocks = list(BlockingFlash(flash, memory).read_blocks(0, 3 << 20))
    assert [block.offset_bytes for block in blocks if block.problem] == [1 << 20]
    flash.faults = lambda request: 512 if request.op is FlashOp.WRITE else None
    with pytest.raises(LowerLayerError, match="short transfer"):
        BlockingFlash(flash, memory).write(0, bytes(4096))


def test_scratch_memory_must_hold_a_page() -> None:
    flash, _ = blank_flash(8 << 20)
    memory = AnonymousMemory(2048)
    with pytest.raises(LowerLayerError):
        BlockingFlash(flash, memory)


def test_what_counts_as_whole() -> None:
    assert problem_of(4096, 4096) is None
    assert problem_of(0, 0) is None
    assert "short" in str(problem_of(512, 4096))
    assert "error" in str(problem_of(-errno.EIO, 4096))
