"""The native hot path, where it was built (`_hot_*.c`; docs/adr/0006-native-hot-path.md).

Serves the plain case of LOOKUP and RETRIEVE from capsule to capsule on the arrays that index, window, eviction policy
and counters own, and leaves everything else, having changed nothing, to the engine's general way. The library's
`KeyTable` and `Frames` stand in for parts of `key_hash` and `window`, which say what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from common import native

if TYPE_CHECKING:
    from common.wire import Entries, ReadableBuffer
    from doca_shims.api import Clock
    from dpu_app.regions.catalogue import Catalogue
    from dpu_app.regions.sessions import Connection, Session
    from dpu_app.regions.stats import Stats
    from dpu_app.regions.window import Window

FRAME_BYTES = 4
"""Of a packed frame number."""
LIBRARY: Any = native.load("dpu_app.regions._hot_path")
"""None where it was not built or is switched off."""


Served: TypeAlias = "tuple[bytes, bytes | None, bytes | None, int | None]"
"""The response; the packed RDMA_REQUESTs of its WRITEs, the frames (packed u32) that are held for them from now on, and
the bytes that they move; all three None where nothing is to be moved."""


class HotPath:
    """`create` makes one for an engine."""

    def __init__(self, native_path: Any, catalogue: Catalogue) -> None:
        self._serve = native_path.serve
        self._find = native_path.find
        self._catalogue = catalogue

    def serve(self, capsule: ReadableBuffer, connection: Connection) -> Served | None:
        """None, and nothing is changed, for what is not plain. The capsule is not needed any more."""
        served: Served | None = self._serve(
            capsule,
            connection.session.table,
            connection.batches,
            connection.window_lkey,
            connection.room,
            self._catalogue.ordered,
            connection.room_moved,
        )
        return served

    def find(self, entries: Entries, session: Session) -> tuple[list[int], list[int]] | None:
        """Per entry the slot of its block or -1, whether it has expired or not; and the entries that are denied. None
        where it cannot tell."""
        found: tuple[list[int], list[int]] | None = self._find(entries, entries.itemsize, session.table)
        return found


def create(catalogue: Catalogue, window: Window, stats: Stats, clock: Clock) -> HotPath | None:
    """None where the library was missing when index and window were made."""
    key_hash = catalogue.index.key_hash
    if LIBRARY is None or key_hash.table is None or window.frames is None:
        return None
    hits = catalogue.hit_counters
    index = catalogue.index
    path = LIBRARY.HotPath(
        key_hash.table,
        window.frames,
        key_hash.homeless,
        (index.length, index.checksum, index.expires_s, stats.values),
        *(hits or (None, None)),
        None if hits else catalogue.count_one,
        clock.wall_ns,
        window.address(0),
        window.frame_bytes,
    )
    return HotPath(path, catalogue)
