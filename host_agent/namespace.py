"""A namespace as the client's callers hold it: the record, its digest, and the keys of blocks in it.

Plain values; registered with the DPUs by `Client.namespace`, which makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common import identity
from common.errors import UserError
from common.identity import NamespaceRecord, Tokens


@dataclass(frozen=True)
class Namespace:
    """`block_bytes`, the largest block, picks the regions by their slot size; None: those with the largest slots.
    Every agent that uses the namespace must say the same, else it looks in other regions and misses."""

    record: NamespaceRecord
    digest: bytes
    block_bytes: int | None

    def block_keys(self, tokens: Tokens, *, extras: Sequence[bytes] | None = None) -> list[bytes]:
        """Keys of all whole blocks of a prompt, in order, by the record's `block_tokens`. Raises UserError."""
        block_tokens = self.record.block_tokens
        if not isinstance(block_tokens, int):
            raise UserError("the namespace record does not say how many tokens a block has")
        return identity.block_keys(self.digest, tokens, block_tokens, extras=extras)

    def block_key(self, parent_key: bytes | None, engine_hash: bytes) -> bytes:
        """The key of a block that the engine names by its own hash."""
        return identity.block_key(self.digest, parent_key, engine_hash=engine_hash)
