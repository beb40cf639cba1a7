"""Options of the emulated fabrics: strings from the configuration, checked."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from doca_shims.api import ShimError


def read_seconds(options: Mapping[str, str], defaults: Mapping[str, float]) -> dict[str, float]:
    """Every option of `defaults` as positive seconds. Raises ShimError EINVAL for an unknown name or a bad value."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ShimError(errno.EINVAL, "open", f"unknown options {unknown}; there are: {sorted(defaults)}")
    values = dict(defaults)
    for name, text in options.items():
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = 0.0
        if not 0 < values[name] < 86400:
            raise ShimError(errno.EINVAL, "open", f"option {name} is {text!r}: give seconds, more than 0")
    return values
