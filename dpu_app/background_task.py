"""One task in a thread of its own, whose end an event loop waits for by descriptor."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType


class BackgroundTask:
    """`fileno` is readable once `task` has ended; `finish` then raises what it raised. Without a task, it never is.
    A context manager: leaving waits for the task."""

    def __init__(self, task: Callable[[], None] | None) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._future = None if task is None else self._executor.submit(task)
        if self._future is not None:
            self._future.add_done_callback(lambda _: os.eventfd_write(self._event, 1))

    def fileno(self) -> int:
        return self._event

    def finish(self) -> None:
        """Wait for the end. Raises what the task raised."""
        if self._future is not None:
            self._future.result()

    def __enter__(self) -> BackgroundTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()
        os.close(self._event)
