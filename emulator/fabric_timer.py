"""A one-shot timer as a descriptor that an epoll can wait for (timerfd; Python has it only from 3.13)."""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """Owns its descriptor `fd`, which is readable once the time is over."""

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, after_s: float) -> None:
        """Fire once, `after_s` from now (at least a nanosecond)."""
        nanoseconds = max(1, int(after_s * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 1_000_000_000)))
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(_Itimerspec()), None)

    def clear(self) -> None:
        """Forget that it fired."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
