"""Eviction policies, by name. `create` is the only way the rest of the region makes one."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import UserError
from dpu_app.regions.eviction.base import EvictionPolicy
from dpu_app.regions.eviction.fifo import Fifo
from dpu_app.regions.eviction.lru import Lru
from dpu_app.regions.eviction.s3fifo import S3Fifo
from dpu_app.regions.eviction.sieve import Sieve

__all__ = ["DEFAULT", "POLICIES", "EvictionPolicy", "create"]

DEFAULT = "s3fifo"
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"s3fifo": S3Fifo, "lru": Lru, "fifo": Fifo, "sieve": Sieve}


def create(name: str, slots: int) -> EvictionPolicy:
    """Raises UserError naming the policies there are."""
    policy = POLICIES.get(name)
    if policy is None:
        raise UserError(f"there is no eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return policy(slots)
