"""Sizes and durations as people write them: "64KiB", "2s", "500ms". Exact, and never without a unit (0 aside).

Called by `common.config` for every field declared as a size or a duration, and by the CLIs for their options and
reports.
"""

from __future__ import annotations

import re
from fractions import Fraction

from common.errors import UserError

SIZE_UNITS: dict[str, int] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}
DURATION_UNITS: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_SIZE_FORMATS = ("PiB", "TiB", "GiB", "MiB", "KiB")
_DURATION_FORMATS = ("d", "h", "min", "s", "ms", "us", "ns")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)", re.ASCII)


class UnitError(UserError):
    """Text that is not a size or not a duration."""


def _parse(text: str, what: str, units: dict[str, int] | dict[str, Fraction], example: str) -> Fraction:
    text = text.strip()
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not a {what}; write a number and a unit, such as {example!r}")
    number, unit = Fraction(match[1]), match[2]
    if not unit:
        if number == 0:
            return number
        raise UnitError(f"{text!r} has no unit; write a {what} such as {example!r}")
    if unit not in units:
        known = ", ".join(units)
        raise UnitError(f"{text!r} has no known unit of a {what}: {unit!r} is none of {known}")
    return number * units[unit]


def parse_size(text: str) -> int:
    """Bytes in "64KiB", "1.5GiB", "10GB" (decimal) or "0". Raises UnitError."""
    value = _parse(text, "size", SIZE_UNITS, "64KiB")
    if value.denominator != 1:
        raise UnitError(f"{text!r} is not a whole number of bytes")
    return value.numerator


def parse_duration(text: str) -> float:
    """Seconds in "2s", "500ms", "1.5h" or "0". Raises UnitError."""
    return float(_parse(text, "duration", DURATION_UNITS, "500ms"))


def format_size(size_bytes: int) -> str:
    """The exact size in the largest binary unit that divides it: the inverse of `parse_size`."""
    for unit in _SIZE_FORMATS:
        if size_bytes and size_bytes % SIZE_UNITS[unit] == 0:
            return f"{size_bytes // SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def format_duration(duration_s: float) -> str:
    """The duration to the nanosecond, in the largest unit that gives a whole number: inverse of `parse_duration`
    for every whole number of nanoseconds that a float can hold."""
    duration_ns = round(Fraction(duration_s) * 10**9)
    for unit in _DURATION_FORMATS:
        unit_ns = DURATION_UNITS[unit] * 10**9
        if duration_ns and duration_ns % unit_ns == 0:
            return f"{duration_ns // int(unit_ns)}{unit}"
    return "0s"


def approximate_size(size_bytes: float) -> str:
    """For people's eyes: three digits and a binary unit, such as "1.50 GiB"."""
    for unit in _SIZE_FORMATS:
        if size_bytes >= SIZE_UNITS[unit]:
            amount = size_bytes / SIZE_UNITS[unit]
            return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"
    return f"{size_bytes:.0f} B"
