from __future__ import annotations

import select
import threading

import pytest

from dpu_app.background_task import BackgroundTask


def _readable(task: BackgroundTask, timeout_s: float) -> bool:
    return bool(select.select([task], [], [], timeout_s)[0])


def test_its_end_is_told_by_the_descriptor() -> None:
    go = threading.Event()

    def wait() -> None:
        go.wait(10)

    with BackgroundTask(wait) as task:
        assert not _readable(task, 0)
        go.set()
        assert _readable(task, 10)
        task.finish()


def test_what_it_raises_is_raised_by_finish() -> None:
    def fail() -> None:
        raise OSError(5, "flash is gone")

    with BackgroundTask(fail) as task:
        assert _readable(task, 10)
        with pytest.raises(OSError, match="flash is gone"):
            task.finish()


def test_no_task_never_ends() -> None:
    with BackgroundTask(None) as task:
        assert not _readable(task, 0)
