"""The manifest of a file kept as blocks: in which namespace, under which keys, how long, with which checksums.

JSON, written by `entresol-agent put` and read by the other commands. A block's key is chained: it hashes the block's
content and the key before it, so that equal beginnings of files share blocks, as equal prefixes of prompts do.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from common.errors import UserError
from common.identity import KEY_BYTES, NamespaceRecord, block_key

VERSION: Final = 1
_CONTENT_PERSON = b"entresol-file-v1"


@dataclass(frozen=True)
class ManifestBlock:
    key: bytes
    length_bytes: int
    checksum: int
    """XXH3-64."""


@dataclass(frozen=True)
class Manifest:
    """`block_bytes` is what the file was cut into: of all blocks but the last."""

    record: NamespaceRecord
    block_bytes: int
    blocks: tuple[ManifestBlock, ...]
    source: str

    @property
    def length_bytes(self) -> int:
        return sum(block.length_bytes for block in self.blocks)

    @property
    def keys(self) -> list[bytes]:
        return [block.key for block in self.blocks]

    def to_json(self) -> str:
        values = {
            "entresol_manifest": VERSION,
            "source": self.source,
            "namespace_record": self.record.to_bytes().hex(),
            "block_bytes": self.block_bytes,
            "length_bytes": self.length_bytes,
            "blocks": [
                {"key": block.key.hex(), "length_bytes": block.length_bytes, "xxh3_64": f"{block.checksum:016x}"}
                for block in self.blocks
            ],
        }
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> Manifest:
        """Raises UserError, naming `source`, for anything that `to_json` would not have written."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"{source}: not a manifest: {error}") from None
        if not isinstance(values, dict) or values.get("entresol_manifest") != VERSION:
            raise UserError(f"{source}: not a manifest of version {VERSION}")
        try:
            manifest = cls(
                NamespaceRecord.from_bytes(bytes.fromhex(values["namespace_record"])),
                _positive(values["block_bytes"]),
                tuple(_block(block) for block in values["blocks"]),
                str(values["source"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: the manifest is damaged: {error!r}") from None
        if any(block.length_bytes > manifest.block_bytes for block in manifest.blocks):
            raise UserError(f"{source}: the manifest is damaged: a block is longer than block_bytes")
        return manifest


def content_key(namespace_digest: bytes, parent_key: bytes | None, content: memoryview) -> bytes:
    """Key of a block of a file."""
    digest = hashlib.blake2b(content, digest_size=32, person=_CONTENT_PERSON).digest()
    return block_key(namespace_digest, parent_key, engine_hash=digest)


def parse_key(text: str) -> bytes:
    """A key as people write it. Raises UserError."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(f"{text!r} is no block key: write {2 * KEY_BYTES} hexadecimal digits")
    return key


def _block(values: Any) -> ManifestBlock:
    return ManifestBlock(parse_key(values["key"]), _positive(values["length_bytes"]), int(values["xxh3_64"], 16))


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a size")
    return value
