"""The flash contract on both drivers, on a real O_DIRECT file (and a loop device where one can be had)."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from doca_shims import flash_contract
from doca_shims.api import FlashDevice, FlashOp, FlashRequest, Memory, ShimError
from dpu_app.flash import io_uring, thread_pool
from dpu_app.flash.anonymous_memory import AnonymousMemory

FACTORIES: dict[str, Callable[[str, Mapping[str, str]], FlashDevice]] = {
    "io_uring": io_uring.create,
    "thread_pool": thread_pool.create,
}
CAPACITY_BYTES = 8 << 20
NO_WAIT = {"lock_timeout_ms": "0"}


def _usable(driver: str, path: Path) -> None:
    """Skip, with the reason, where this driver or O_DIRECT cannot be had."""
    try:
        FACTORIES[driver](str(path), NO_WAIT).close()
    except ShimError as error:
        if error.operation.startswith("io_uring") or "O_DIRECT" in error.detail:
            pytest.skip(str(error))
        raise


@pytest.fixture(params=sorted(FACTORIES))
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def flash_path(driver: str, tmp_path: Path) -> Path:
    path = tmp_path / "flash"
    path.touch(mode=0o600)
    os.truncate(path, CAPACITY_BYTES)
    _usable(driver, path)
    return path


@pytest.fixture
def loop_device(driver: str, tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("a loop device needs root and losetup")
    path = tmp_path / "disk"
    path.touch()
    os.truncate(path, CAPACITY_BYTES)
    attach = subprocess.run(["losetup", "--find", "--show", str(path)], capture_output=True, text=True, check=False)
    if attach.returncode != 0:
        pytest.skip(f"no loop device: {attach.stderr.strip()}")
    device = Path(attach.stdout.strip())
    try:
        _usable(driver, device)
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


def _target(driver: str, path: Path, options: Mapping[str, str]) -> flash_contract.FlashUnderTest:
    def allocate(length_bytes: int) -> Memory:
        return AnonymousMemory(length_bytes)

    return flash_contract.FlashUnderTest(lambda: FACTORIES[driver](str(path), options), allocate)


@pytest.mark.parametrize("check", flash_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(driver: str, flash_path: Path, check: Callable[[flash_contract.FlashUnderTest], None]) -> None:
    check(_target(driver, flash_path, {}))


@pytest.mark.parametrize("check", flash_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract_at_queue_depth_one_more_than_a_power(
    driver: str, flash_path: Path, check: Callable[[flash_contract.FlashUnderTest], None]
) -> None:
    check(_target(driver, flash_path, {"queue_depth": "33"}))


def test_contract_through_the_page_cache(driver: str, flash_path: Path) -> None:
    flash_contract.run(_target(driver, flash_path, {"direct": "false"}))


def test_contract_on_a_loop_device(driver: str, loop_device: Path) -> None:
    flash_contract.run(_target(driver, loop_device, {}))


def test_one_owner_at_a_time(driver: str, flash_path: Path) -> None:
    first = FACTORIES[driver](str(flash_path), NO_WAIT)
    with pytest.raises(ShimError) as refused:
        FACTORIES[driver](str(flash_path), NO_WAIT)
    first.close()
    assert refused.value.errno == errno.EBUSY
    FACTORIES[driver](str(flash_path), NO_WAIT).close()


def test_killed_owner_is_followed_by_the_next(driver: str, flash_path: Path) -> None:
    """The kernel lets go of a killed owner's flash only when the owner's last write is over; the next waits for it."""
    script = (
        "import sys, importlib, signal\n"
        "device = importlib.import_module('dpu_app.flash.' + sys.argv[1]).create(sys.argv[2], {})\n"
        "print('open', flush=True)\n"
        "signal.pause()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, driver, str(flash_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(ShimError) as refused:
            FACTORIES[driver](str(flash_path), NO_WAIT)
        assert refused.value.errno == errno.EBUSY
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    FACTORIES[driver](str(flash_path), {}).close()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, errno.ENOENT),
        (lambda path: path.mkdir(), errno.EINVAL),
        (lambda path: path.touch(), errno.EINVAL),
        (lambda path: path.write_bytes(b"x"), errno.EINVAL),
        (lambda path: os.mkfifo(path), errno.EINVAL),
    ],
    ids=["absent", "directory", "empty", "one-byte", "fifo"],
)
def test_what_cannot_be_flash(driver: str, tmp_path: Path, make: Callable[[Path], None], code: int) -> None:
    path = tmp_path / "flash"
    make(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ShimError) as refused:
        FACTORIES[driver](str(path), NO_WAIT)
    assert refused.value.errno == code
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "options",
    [{"depth": "4"}, {"queue_depth": "0"}, {"queue_depth": "5000"}, {"direct": "yes"}, {"lock_timeout_ms": "-1"}],
    ids=str,
)
def test_bad_options(driver: str, flash_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(ShimError) as refused:
        FACTORIES[driver](str(flash_path), options)
    assert refused.value.errno == errno.EINVAL


def test_a_short_read_is_told(driver: str, flash_path: Path) -> None:
    """A file shortened under the device: the short count comes back as it is, never as a whole read."""
    device = FACTORIES[driver](str(flash_path), {})
    memory = AnonymousMemory(1 << 20)
    try:
        device.register_memory(memory)
        os.truncate(flash_path, 4096)
        device.submit([FlashRequest(1, FlashOp.READ, 0, memory.address, 8192)])
        assert select.select([device.fileno()], [], [], 10)[0]
        assert [(done.tag, done.result) for done in device.poll()] == [(1, 4096)]
    finally:
        device.close()
        memory.close()


def test_nothing_is_left_open(driver: str, flash_path: Path) -> None:
    FACTORIES[driver](str(flash_path), {}).close()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        FACTORIES[driver](str(flash_path), NO_WAIT).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
