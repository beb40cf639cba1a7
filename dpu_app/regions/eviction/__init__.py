"""Eviction policies, by name. `create` is the only way the rest of the region makes one."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import UserError
from dpu_app.regions.eviction.base import EvictionPolicy, FingerprintOf, Scan
from dpu_app.regions.eviction.fifo import Fifo
from dpu_app.regions.eviction.lru import Lru
from dpu_app.regions.eviction.s3fifo import S3Fifo
from dpu_app.regions.eviction.sieve import Sieve

__all__ = ["DEFAULT", "POLICIES", "EvictionPolicy", "FingerprintOf", "Scan", "create"]

DEFAULT = "s3fifo"
POLICIES: dict[str, Callable[[int, FingerprintOf], EvictionPolicy]] = {
    "s3fifo": S3Fifo,
    "lru": lambda slots, _: Lru(slots),
    "fifo": lambda slots, _: Fifo(slots),
    "sieve": lambda slots, _: Sieve(slots),
}


def create(name: str, slots: int, fingerprint_of: FingerprintOf) -> EvictionPolicy:
    """`fingerprint_of` tells a slot's fingerprint while the slot is known to the policy. Raises UserError naming the
    policies there are."""
    policy = POLICIES.get(name)
    if policy is None:
        raise UserError(f"there is no eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return policy(slots, fingerprint_of)
