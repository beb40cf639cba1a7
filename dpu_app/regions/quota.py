"""The quota hook: may this tenant put so many more bytes into this region?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class QuotaPolicy(Protocol):
    def admits(self, tenant: str, used_bytes: int, more_bytes: int) -> bool: ...


class FixedQuotas:
    """`limits` maps a tenant to its bytes in this region; others get `default_bytes` (0: no limit)."""

    def __init__(self, limits: Mapping[str, int], default_bytes: int = 0) -> None:
        self._limits = dict(limits)
        self._default_bytes = default_bytes

    def admits(self, tenant: str, used_bytes: int, more_bytes: int) -> bool:
        limit = self._limits.get(tenant, self._default_bytes)
        return limit == 0 or used_bytes + more_bytes <= limit
