"""Which driver serves a flash, and how a flash file comes to be. The composition root calls this.

Chooses by what the kernel allows, says in the log what it chose and why; knows no driver but by its name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Mapping

from common.errors import AlreadyExistsError, LowerLayerError, UserError
from doca_shims.api import FlashDevice, ShimError
from doca_shims.registry import create_flash

AUTO = "auto"
DRIVERS_BY_PREFERENCE = ("io_uring", "thread_pool")
_LOG = logging.getLogger(__name__)


def open_flash(path: str, driver: str = AUTO, options: Mapping[str, str] | None = None) -> FlashDevice:
    """Open the file or block device at `path` by the driver named, or by the best that works here.

    The caller closes it. Raises ShimError as the driver does; with ``auto`` only what the last one raised, or at
    once where the fault lies with the flash and not with the driver.
    """
    given = dict(options or {})
    if driver != AUTO:
        return _opened(path, driver, given, "as configured")
    reason = "the first choice"
    for name in DRIVERS_BY_PREFERENCE[:-1]:
        try:
            return _opened(path, name, given, reason)
        except ShimError as error:
            if not error.operation.startswith(name):
                raise
            reason = f"{name} cannot be used: {error.detail}"
    return _opened(path, DRIVERS_BY_PREFERENCE[-1], given, reason)


def _opened(path: str, driver: str, options: Mapping[str, str], reason: str) -> FlashDevice:
    device = create_flash(driver, path, options)
    caps = device.caps
    _LOG.info(
        "flash %s: driver %s (%s), %d bytes, O_DIRECT block %d bytes, queue depth %d",
        path,
        caps.driver,
        reason,
        caps.capacity_bytes,
        caps.block_bytes,
        caps.queue_depth_max,
    )
    return device


def create_flash_file(path: str, capacity_bytes: int, preallocate: bool) -> None:
    """Make sure that a file of `capacity_bytes` is there to serve as flash, private to the user.

    One of that size that exists is left as it is. With `preallocate` its space is taken now, so that writes
    cannot meet a full file system later. Raises AlreadyExistsError (another size, or not a file), UserError (bad size,
    no space; nothing is left behind), LowerLayerError.
    """
    if capacity_bytes <= 0 or capacity_bytes % 4096:
        raise UserError(f"flash file {path}: {capacity_bytes} bytes is not a positive multiple of 4096")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        _require_size(path, capacity_bytes)
        return
    except OSError as error:
        raise LowerLayerError(f"create {path}", error.errno or 0) from error
    try:
        os.ftruncate(fd, capacity_bytes)
        if preallocate:
            os.posix_fallocate(fd, 0, capacity_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise UserError(
                f"flash file {path}: {os.strerror(error.errno)} for {capacity_bytes} bytes; make room or choose fewer"
            ) from error
        raise LowerLayerError(f"allocate {path}", error.errno or 0) from error
    finally:
        os.close(fd)


def _require_size(path: str, capacity_bytes: int) -> None:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise AlreadyExistsError(f"{path} exists and is not a regular file")
    if status.st_size != capacity_bytes:
        raise AlreadyExistsError(
            f"flash file {path} holds {status.st_size} bytes, not {capacity_bytes}: "
            "set that capacity, or remove the file and lose what is in it"
        )
