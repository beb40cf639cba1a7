"""The disk's limit is measured on a file that leaves no trace, by fio where it can."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import LowerLayerError
from host_agent.bench import fio
from host_agent.bench.flash_limit import THREADS_NAME, FlashLimit

LENGTH = 8 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # on a disk, where /tmp may not be
        yield Path(name)


def _rates(limit: FlashLimit) -> list[float]:
    return [limit.rate(way, size, 4, 3) for way in ("read", "write", "first_write") for size in (64 << 10, 1 << 20)]


def test_without_fio_threads_measure_and_leave_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "version", lambda: "")
    with FlashLimit(directory, LENGTH, 0.01) as limit:
        assert limit.method == f"{THREADS_NAME}, since fio is not installed"
        assert min(_rates(limit)) > 0
        assert list(directory.iterdir()) == []
    limit.close()


def test_with_fio_that_cannot_its_words_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> float:
        raise LowerLayerError("fio", 0, "io_uring_setup: not permitted")

    monkeypatch.setattr(fio, "version", lambda: "fio-3")
    monkeypatch.setattr(fio, "rate", refuse)
    with FlashLimit(directory, LENGTH, 0.01) as limit:
        assert limit.method.startswith(THREADS_NAME)
        assert "not permitted" in limit.method
        assert limit.rate("read", 64 << 10, 4, 3) > 0


@pytest.mark.skipif(not fio.version(), reason="fio is not installed")
def test_fio_measures_the_same_file(directory: Path) -> None:
    with FlashLimit(directory, LENGTH, 0.02) as limit:
        assert limit.method.startswith("fio-") or "since fio" in limit.method
        assert min(_rates(limit)) > 0
        assert list(directory.iterdir()) == []


def test_a_directory_that_is_absent_is_said(tmp_path: Path) -> None:
    with pytest.raises(LowerLayerError, match="absent"):
        FlashLimit(tmp_path / "absent", 4 << 20, 0.01)


def test_fio_is_asked_for_the_same_depth_and_no_page_cache() -> None:
    words = fio.command("write", Path("/proc/1/fd/3"), LENGTH, 4096, 16, 0.5)
    assert {"--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=4096", "--runtime=500ms"} <= set(words)
    assert {"--rw=randwrite", "--overwrite=1", "--allow_file_create=0"} <= set(words)


def test_a_first_write_goes_to_each_place_once() -> None:
    words = fio.command("first_write", Path("/proc/1/fd/3"), LENGTH, 4096, 16, 0.5)
    assert {"--rw=randwrite", "--overwrite=0", "--fallocate=none", "--allow_file_create=0"} <= set(words)
    assert "--time_based" not in words


def test_what_fio_printed() -> None:
    jobs = [{"jobname": "read", "read": {"bw_bytes": 123}, "write": {"bw_bytes": 0}}]
    printed = "fio: a warning\n" + json.dumps({"jobs": jobs})
    assert fio.parse(printed, "read") == 123
    for text, way, words in (
        (printed, "write", "moved nothing"),
        ("{}", "read", "not understood"),
        ("fio: no", "read", "not understood"),
    ):
        with pytest.raises(LowerLayerError, match=words):
            fio.parse(text, way)
