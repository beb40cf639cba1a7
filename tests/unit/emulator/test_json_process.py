from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UnavailableError
from emulator import json_process
from emulator.json_process import JsonProcess


@contextlib.contextmanager
def child() -> Iterator[JsonProcess]:
    process = JsonProcess("the child", "tests.unit.emulator.json_child", [], "mark")
    try:
        assert process.hear(30) == {"ready": True}
        yield process
    finally:
        process.close()
    assert not Path(f"/proc/{process.pid}").exists()


def test_what_it_says_is_heard_in_order_however_it_arrives() -> None:
    with child() as process:
        for word in ("twice", "half"):
            process.tell({"word": word})
        assert [process.hear(30) for _ in range(3)] == [1, 2, {"half": 1}]


def test_nobody_waits_longer_than_the_deadline_for_one_that_says_nothing() -> None:
    with child() as process, pytest.raises(UnavailableError, match=r"no answer from the child for 0\.05 s"):
        process.hear(0.05)


def test_one_that_has_ended_is_told_with_its_exit_code() -> None:
    with child() as process:
        process.tell({"word": "end"})
        with pytest.raises(UnavailableError, match="exit code 3"):
            process.hear(30)


def test_one_that_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_process, "_END_TIMEOUT_S", 0.1)
    with child() as process:
        process.tell({"word": "deaf"})
