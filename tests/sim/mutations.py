"""Ways to break the engine on purpose: each must be noticed by the simulation within a few hundred seeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common.status import BlockState
from dpu_app.regions.catalogue import Catalogue, Unflushed
from dpu_app.regions.flash_queue import FlashJob, FlashQueue
from dpu_app.regions.sessions import Connection
from dpu_app.regions.store_path import StorePath
from dpu_app.regions.window import Window

Mutation = Callable[[], AbstractContextManager[Any]]
SEEDS_MAX = 400


def no_checksum_on_load() -> AbstractContextManager[Any]:
    """What flash gives back is served unseen."""
    blind = SimpleNamespace(xxh3_64_intdigest=lambda data: _Anything())
    return mock.patch("dpu_app.regions.load_path.xxhash", blind)


class _Anything(int):
    """Equal to every checksum."""

    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def acknowledged_before_the_entry_is_written() -> AbstractContextManager[Any]:
    """`flash` is answered when the data is on flash and its entry is not."""
    original = StorePath._data_written

    def early(self: StorePath, record: Unflushed, aligned: int, error: int) -> None:
        original(self, record, aligned, error)
        if record.entry_due:
            waiters, record.waiters = record.waiters, []
            self._context.window._block_state[record.frame] = BlockState.STAGED_AND_FLASH
            for waiter in waiters:
                waiter(True)

    return mock.patch.object(StorePath, "_data_written", early)


def short_transfers_count_as_whole() -> AbstractContextManager[Any]:
    original = FlashQueue._finish_piece

    def lenient(self: FlashQueue, job: FlashJob, start: int, length: int, result: int) -> None:
        original(self, job, start, length, length if result > 0 else result)

    return mock.patch.object(FlashQueue, "_finish_piece", lenient)


def frames_stay_held_after_delivery() -> AbstractContextManager[Any]:
    patch: AbstractContextManager[Any] = mock.patch.multiple(Window, unhold_all=_ignore, unhold_packed=_ignore)
    return patch


def frames_are_reused_while_they_are_read() -> AbstractContextManager[Any]:
    ignored: dict[str, Any] = dict.fromkeys(("hold", "hold_all", "unhold", "unhold_all", "unhold_packed"), _ignore)
    patch: AbstractContextManager[Any] = mock.patch.multiple(Window, **ignored)
    return patch


def _ignore(*arguments: object) -> None: ...


def the_hot_path_does_not_hold_frames() -> AbstractContextManager[Any]:
    """Its frames are given back as soon as their WRITEs are asked for."""
    original = Connection.follow

    def follow(self: Connection, wrs: int, moved: int, frames: bytes) -> None:
        self._unhold(frames)
        original(self, wrs, moved, b"")

    return mock.patch.object(Connection, "follow", follow)


def pins_do_not_hold() -> AbstractContextManager[Any]:
    return mock.patch.object(Catalogue, "_pinned", return_value=False)


ALL: tuple[Mutation, ...] = (
    no_checksum_on_load,
    acknowledged_before_the_entry_is_written,
    short_transfers_count_as_whole,
    frames_stay_held_after_delivery,
    frames_are_reused_while_they_are_read,
    the_hot_path_does_not_hold_frames,
    pins_do_not_hold,
)
