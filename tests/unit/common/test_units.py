"""Sizes and durations: what is read, what is refused, and that formatting is the inverse of parsing."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import units


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1B", 1),
        ("64KiB", 65536),
        ("2 MiB", 2 << 20),
        ("1.5GiB", 3 << 29),
        ("10GB", 10**10),
        (" 3TiB ", 3 << 40),
    ],
)
def test_size_is_read(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "64", "64kib", "64Ki", "-1KiB", "1e3B", "0.3B", "KiB", "1 2KiB", "2s", "٣KiB"])
def test_bad_size_is_refused(text: str) -> None:
    with pytest.raises(units.UnitError):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("0", 0), ("2s", 2), ("500ms", 0.5), ("1.5h", 5400), ("10us", 1e-5), ("7d", 604800), ("5min", 300)],
)
def test_duration_is_read(text: str, duration_s: float) -> None:
    assert units.parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["", "2", "2m", "2sec", "-2s", "1:30", "64KiB"])
def test_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(units.UnitError):
        units.parse_duration(text)


@given(st.integers(0, 1 << 62))
def test_size_survives_formatting(size_bytes: int) -> None:
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**15))
def test_duration_survives_formatting(duration_us: int) -> None:
    duration_s = duration_us / 10**6
    assert units.parse_duration(units.format_duration(duration_s)) == pytest.approx(duration_s, rel=1e-15, abs=1e-9)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (units.parse_size, units.parse_duration):
        with contextlib.suppress(units.UnitError):
            assert parse(text) >= 0


def test_approximate_size_is_for_eyes() -> None:
    assert units.approximate_size(0) == "0 B"
    assert units.approximate_size(3 << 29) == "1.5 GiB"
    assert units.approximate_size(1022 << 20) == "1022 MiB"
