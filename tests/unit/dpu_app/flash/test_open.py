"""Which driver is chosen, and how a flash file comes to be."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import AlreadyExistsError, UserError
from doca_shims.api import FlashDevice, ShimError
from dpu_app.flash import open as flash_open
from dpu_app.flash import ring, thread_pool
from dpu_app.flash.open import create_flash_file, open_flash

CAPACITY_BYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "flash")
    create_flash_file(path, CAPACITY_BYTES, preallocate=False)
    return path


@contextmanager
def _drivers(monkeypatch: pytest.MonkeyPatch, failure: ShimError | None) -> Iterator[list[str]]:
    """Drivers of which io_uring fails as told; yields the names asked for. Threads stand for both."""
    asked: list[str] = []

    def create(name: str, path: str, options: Mapping[str, str]) -> FlashDevice:
        asked.append(name)
        if name == "io_uring" and failure is not None:
            raise failure
        return thread_pool.create(path, {"direct": "false", **options})

    monkeypatch.setattr(flash_open, "create_flash", create)
    yield asked


def test_without_io_uring_threads_serve(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with _drivers(monkeypatch, ShimError(errno.EPERM, "io_uring_setup", "forbidden")) as asked:
        open_flash(path).close()
    assert asked == ["io_uring", "thread_pool"]


def test_a_fault_of_the_flash_is_told_at_once(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with _drivers(monkeypatch, ShimError(errno.EBUSY, "flock", "taken")) as asked, pytest.raises(ShimError) as refused:
        open_flash(path)
    assert refused.value.errno == errno.EBUSY
    assert asked == ["io_uring"]


def test_a_named_driver_has_no_stand_in(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    failure = ShimError(errno.ENOSYS, "io_uring_setup", "absent")
    with _drivers(monkeypatch, failure) as asked, pytest.raises(ShimError) as refused:
        open_flash(path, "io_uring")
    assert refused.value.errno == errno.ENOSYS
    assert asked == ["io_uring"]


def test_the_installed_drivers_are_found(path: str) -> None:
    device = open_flash(path, "thread_pool", {"direct": "false", "queue_depth": "5"})
    assert (device.caps.driver, device.caps.queue_depth_max) == ("thread_pool", 5)
    assert device.caps.capacity_bytes == CAPACITY_BYTES
    device.close()


def test_a_kernel_without_io_uring_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own answer, to a system call that it does not have."""
    monkeypatch.setattr(ring, "_SYS_SETUP", 4095)
    with pytest.raises(ShimError) as refused:
        ring.Ring(8)
    assert refused.value.errno == errno.ENOSYS
    assert refused.value.operation == "io_uring_setup"


@pytest.mark.parametrize("preallocate", [False, True])
def test_a_flash_file_is_made_once_and_private(tmp_path: Path, preallocate: bool) -> None:
    path = tmp_path / "flash"
    create_flash_file(str(path), CAPACITY_BYTES, preallocate)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == CAPACITY_BYTES
    assert (status.st_blocks * 512 >= CAPACITY_BYTES) is preallocate
    path.write_bytes(b"x" * CAPACITY_BYTES)
    create_flash_file(str(path), CAPACITY_BYTES, preallocate)
    assert path.read_bytes()[:1] == b"x"


def test_a_file_of_another_size_is_left_alone(path: str) -> None:
    with pytest.raises(AlreadyExistsError):
        create_flash_file(path, 2 * CAPACITY_BYTES, preallocate=False)
    assert os.path.getsize(path) == CAPACITY_BYTES


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AlreadyExistsError):
        create_flash_file(str(tmp_path), CAPACITY_BYTES, preallocate=False)


@pytest.mark.parametrize("capacity_bytes", [0, -4096, 4097])
def test_a_bad_size_is_refused(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(UserError):
        create_flash_file(str(tmp_path / "flash"), capacity_bytes, preallocate=False)
    assert not (tmp_path / "flash").exists()


def test_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY_BYTES, hard))
    try:
        with pytest.raises(UserError):
            create_flash_file(str(tmp_path / "flash"), 2 * CAPACITY_BYTES, preallocate=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "flash").exists()
