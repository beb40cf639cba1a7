"""Who uses the region's namespaces: how many sessions have each open, and what each tenant's blocks take.

Gives out ids for the namespaces of sessions and takes back those that nobody needs any more; never walks through all
of them in Python. Owned by the region engine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpu_app.regions.index import NAMESPACES_MAX, SlotIndex

Ids = npt.NDArray[np.int64]


class NamespaceUse:
    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._opened = np.zeros(NAMESPACES_MAX, np.uint32)
        """Sessions by namespace id."""
        self._of: dict[str, set[int]] = {}
        """By tenant, the ids that its sessions have opened since the region was opened."""
        self._owners: dict[int, set[str]] = {}
        self._arrays: dict[str, Ids] = {}
        """`_of`, where it has been asked for since it changed."""

    def open(self, tenant: str, digest: bytes) -> int:
        """The id of a namespace that a session of `tenant` opens, or -1 when the region has no more to give. `close`
        it."""
        index = self._index
        namespace = index.namespace_id(digest)
        if namespace < 0:
            self._disown(index.take_back_namespaces(self._opened))
            namespace = index.namespace_id(digest)
        if namespace >= 0:
            self._opened[namespace] += 1
            owned = self._of.setdefault(tenant, set())
            if namespace not in owned:
                owned.add(namespace)
                self._owners.setdefault(namespace, set()).add(tenant)
                self._arrays.pop(tenant, None)
        return namespace

    def close(self, namespaces: Ids) -> None:
        """What a session had opened; -1 among them is passed over."""
        np.subtract.at(self._opened, namespaces[namespaces >= 0], 1)

    def bytes_of(self, tenant: str) -> int:
        """What the blocks of a tenant's namespaces take."""
        ids = self._arrays.get(tenant)
        if ids is None:
            owned = self._of.get(tenant, set())
            ids = self._arrays[tenant] = np.fromiter(owned, np.int64, len(owned))
        return int(self._index.namespace_bytes[ids].sum())

    def _disown(self, namespaces: list[int]) -> None:
        for namespace in namespaces:
            for tenant in self._owners.pop(namespace, ()):
                self._of[tenant].discard(namespace)
                self._arrays.pop(tenant, None)
