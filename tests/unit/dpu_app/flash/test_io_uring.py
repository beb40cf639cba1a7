"""What the io_uring driver does where the kernel takes less than it was given; the rest is the contract's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from doca_shims import flash_contract
from doca_shims.api import FlashCompletion, FlashOp, FlashRequest, ShimError
from dpu_app.flash import io_uring
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.flash.ring import Ring

CAPACITY_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "flash"
    path.touch(mode=0o600)
    os.truncate(path, CAPACITY_BYTES)
    try:
        io_uring.create(str(path), {"direct": "false"}).close()
    except ShimError as error:
        pytest.skip(str(error))
    return str(path)


def _run_contract(path: str) -> None:
    target = flash_contract.FlashUnderTest(lambda: io_uring.create(path, {"direct": "false"}), AnonymousMemory)
    flash_contract.run(target)


def test_memory_in_several_pinned_pieces(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Requests that lie in one piece, and requests that lie across two."""
    monkeypatch.setattr(io_uring, "_FIXED_BUFFER_BYTES", 4096)
    _run_contract(path)


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def refuse(self: Ring, slot: int, address: int, length_bytes: int) -> None:
        raise ShimError(errno.ENOMEM, "io_uring_register_buffers", "past RLIMIT_MEMLOCK")

    monkeypatch.setattr(Ring, "register_buffer", refuse)
    _run_contract(path)


class ReluctantRing:
    """Takes only the first `takes` of a batch; what it took completes when asked."""

    def __init__(self, takes: int) -> None:
        self.fd = -1
        self.takes = takes
        self.prepared: list[int] = []
        self.done: list[tuple[int, int]] = []

    def prepare(self, opcode: int, user_data: int, **fields: int) -> None:
        self.prepared.append(user_data)

    def submit(self) -> tuple[int, int]:
        taken, self.prepared = self.prepared[: self.takes], []
        self.done += [(tag, 0) for tag in taken]
        return len(taken), errno.EAGAIN

    def completions(self, wait_count: int = 0) -> list[tuple[int, int]]:
        done, self.done = self.done, []
        return done

    def close(self) -> None: ...


@pytest.fixture
def reluctant(monkeypatch: pytest.MonkeyPatch, path: str) -> Callable[[int], io_uring.IoUringFlash]:
    def make(takes: int) -> io_uring.IoUringFlash:
        device = io_uring.create(path, {"direct": "false"})
        assert isinstance(device, io_uring.IoUringFlash)
        device._ring.close()
        monkeypatch.setattr(device, "_ring", ReluctantRing(takes))
        return device

    return make


FLUSHES = [FlashRequest(tag, FlashOp.FLUSH, 0) for tag in (1, 2, 3)]


def test_what_the_kernel_refuses_of_a_batch_completes_with_its_errno(
    reluctant: Callable[[int], io_uring.IoUringFlash],
) -> None:
    device = reluctant(1)
    device.submit(FLUSHES)
    refused = [FlashCompletion(tag, -errno.EAGAIN) for tag in (2, 3)]
    assert device.poll() == [FlashCompletion(1, 0), *refused]
    assert device.poll() == []
    device.close()


def test_a_batch_refused_as_a_whole_starts_nothing(reluctant: Callable[[int], io_uring.IoUringFlash]) -> None:
    device = reluctant(0)
    with pytest.raises(ShimError) as refused:
        device.submit(FLUSHES)
    assert refused.value.errno == errno.EAGAIN
    assert device.poll() == []
    device.close()
