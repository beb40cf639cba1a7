"""Huge pages for the time of a run: the kernel's pool is set by root, and set back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from common.errors import UserError

_POOL: Final = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def reserved(pages: int, pool: Path = _POOL) -> Iterator[None]:
    """At least `pages` of 2 MiB; nothing is changed for 0, or where there are as many.

    Raises UserError where they cannot be had.
    """
    try:
        before = int(pool.read_text())
        if pages <= before:
            yield
            return
        pool.write_text(str(pages))
    except OSError as error:
        raise UserError(f"--huge-pages: {pool} cannot be set: {error.strerror}; as root it can") from error
    try:
        got = int(pool.read_text())
        if got < pages:
            raise UserError(f"--huge-pages: the kernel gave {got} of {pages}; memory is too full or too fragmented")
        yield
    finally:
        pool.write_text(str(before))
