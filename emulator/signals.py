"""Signals that end a command unwind it, so that whatever it started is ended too. Used by `entresol-emu`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, unwind like Ctrl-C, so that the pod goes down with the
    command. What is ignored, as under nohup, stays ignored."""

    def unwind(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
