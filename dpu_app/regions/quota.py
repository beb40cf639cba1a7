"""The quota hook: how many bytes a tenant's blocks may take in this region.

What counts is what the region holds in namespaces that the tenant's sessions have opened since the region was opened,
and what is on its way in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class QuotaPolicy(Protocol):
    def limit_bytes(self, tenant: str) -> int:
        """0: no limit."""
        ...


class FixedQuotas:
    """`limits` maps a tenant to its bytes in this region; others get `default_bytes` (0: no limit)."""

    def __init__(self, limits: Mapping[str, int], default_bytes: int = 0) -> None:
        self._limits = dict(limits)
        self._default_bytes = default_bytes

    def limit_bytes(self, tenant: str) -> int:
        return self._limits.get(tenant, self._default_bytes)
