"""Which region a block belongs to, from what the sessions know of their DPUs' regions.

Regions are grouped by slot size; a namespace uses the group whose slots fit its blocks best, and within it blocks are
spread by `common.placement`. A topology never changes: a change of the pod makes a new one with a higher epoch.
Regions that are down stay in it, so that a fault moves no block. Used by the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.errors import UnavailableError
from common.placement import PlacedRegion, PodMap
from host_agent.session import RegionFacts


class SlotClass:
    """The regions of one slot size. `pod_map` and `regions` have the same order."""

    def __init__(self, epoch: int, slot_bytes: int, regions: Sequence[RegionFacts]) -> None:
        self.slot_bytes = slot_bytes
        self.regions = tuple(regions)
        self.pod_map = PodMap(epoch, tuple(PlacedRegion(region.uuid, region.weight) for region in regions))


class Topology:
    """`facts` of all regions known. Of a uuid that two DPUs claim the first counts."""

    def __init__(self, epoch: int, facts: Iterable[RegionFacts]) -> None:
        self.epoch = epoch
        by_uuid: dict[bytes, RegionFacts] = {}
        for region in facts:
            by_uuid.setdefault(region.uuid, region)
        self.regions = tuple(by_uuid.values())
        sizes = sorted({region.slot_bytes for region in self.regions if region.weight > 0})
        self._classes = tuple(
            SlotClass(epoch, size, [region for region in self.regions if region.slot_bytes == size]) for size in sizes
        )

    def slot_class(self, block_bytes: int | None) -> SlotClass:
        """The smallest slots that hold `block_bytes`, else the largest there are (also for None).

        Raises UnavailableError when no region is known.
        """
        if not self._classes:
            raise UnavailableError("no DPU has told of a region to use yet")
        if block_bytes is not None:
            for slot_class in self._classes:
                if slot_class.slot_bytes >= block_bytes:
                    return slot_class
        return self._classes[-1]
