"""What a block is: the namespace record, its canonical bytes and digest, and block keys (DESIGN, section 6).

A wrong hit is this field's worst bug, so everything that changes the bytes of a KV block is a field of the
record, every field is always encoded, and what is not known is the explicit value `UNKNOWN`. The same inputs
give the same key in every process, on every architecture and in every release: tests/golden/identity holds it.
Used by the agent (to make keys) and by the DPU's control plane (to check tenants and compute digests itself).
Never does I/O, never uses Python's `hash()`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import UserError

RECORD_VERSION: Final = 1
DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 1024
SALT_BYTES_MAX: Final = 64
RECORD_BYTES_MAX: Final = 16384
EXTRA_BYTES_MAX: Final = 65536


class Unknown(Enum):
    """The explicit value of a field whose truth the caller does not know. It equals itself only: a namespace
    with an unknown revision never shares a block with one whose revision is known."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown.UNKNOWN
Text: TypeAlias = str | Unknown
Count: TypeAlias = int | Unknown
Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any]

_MAGIC = b"ENTNSREC"
_HEAD = struct.Struct("<8sHH")
_FIELD = struct.Struct("<HBI")
_TAG_UNKNOWN, _TAG_TEXT, _TAG_BYTES, _TAG_UINT = 0, 1, 2, 3
_UINT = struct.Struct("<Q")
_DIGEST_PERSON = b"entresol-ns-v1"
_KEY_PERSON = b"entresol-blk-v1"
_BLOCK_HEAD = struct.Struct("<BB16sII")
_SOURCE_TOKENS, _SOURCE_ENGINE_HASH = 1, 2
_NO_PARENT = bytes(KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class NamespaceRecord:
    """Everything a block's bytes depend on besides its tokens. No field has a default: say `UNKNOWN` for what
    is not known, and the empty text for what is known to be absent (no LoRA, no quantisation).

    Raises UserError for a value out of its bounds. Texts are compared by their UTF-8 bytes, case and all.
    """

    tenant: str
    """Whose blocks these are; never unknown or empty. The DPU checks it against the session."""
    salt: bytes
    """Separates users of one tenant from each other (cache salt); empty for none."""
    model_id: Text
    weights_revision: Text
    """A commit or digest of the weights: two revisions behind one model id must never share blocks."""
    lora_id: Text
    """Empty: the base model."""
    lora_revision: Text
    kv_dtype: Text
    """Of the cache as stored, such as ``bfloat16`` or ``fp8_e4m3``."""
    quantisation: Text
    """Of the KV values, scales included; empty for none."""
    layout: Text
    """Order of the bytes in a block: engine, axes, instruction-set tiling, such as ``vllm-LBHNC-vec``."""
    page_tokens: Count
    """Tokens in one page of the engine."""
    block_tokens: Count
    """Tokens in one block: a whole number of pages."""
    layers: Count
    """Layers whose KV this block holds (of this pipeline stage)."""
    kv_heads: Count
    """KV heads in this block (of this tensor-parallel shard)."""
    head_size: Count
    tp_rank: Count
    tp_size: Count
    pp_rank: Count
    pp_size: Count
    cp_rank: Count
    cp_size: Count

    def __post_init__(self) -> None:
        for number, name, kind in _FIELDS:
            _check_field(name, kind, getattr(self, name), number)
        if not self.tenant:
            raise UserError("namespace record: tenant is empty; every namespace belongs to a tenant")
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if isinstance(rank, int) and isinstance(size, int) and not 0 <= rank < size:
                raise UserError(f"namespace record: {axis}_rank {rank} is not below {axis}_size {size}")
        page, block = self.page_tokens, self.block_tokens
        if isinstance(page, int) and isinstance(block, int) and (page == 0 or block == 0 or block % page):
            raise UserError(f"namespace record: block_tokens {block} is not a whole number of pages of {page} tokens")

    def to_bytes(self) -> bytes:
        """The canonical encoding: one byte string per record and one record per byte string."""
        parts = [_HEAD.pack(_MAGIC, RECORD_VERSION, len(_FIELDS))]
        for number, name, _kind in _FIELDS:
            tag, value = _encode_value(getattr(self, name))
            parts.append(_FIELD.pack(number, tag, len(value)))
            parts.append(value)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> NamespaceRecord:
        """The record of canonical bytes. Raises UserError on anything that `to_bytes` would not have written."""
        record = cls(**_decode_fields(bytes(encoded)))
        if record.to_bytes() != encoded:
            raise UserError("namespace record: the encoding is not canonical")
        return record

    def digest(self) -> bytes:
        """The 16 bytes that name this namespace: personalised BLAKE2b of the canonical encoding."""
        return hashlib.blake2b(self.to_bytes(), digest_size=DIGEST_BYTES, person=_DIGEST_PERSON).digest()

    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields whose value is `UNKNOWN`, for a caller that wants to warn or refuse."""
        return tuple(name for _number, name, _kind in _FIELDS if getattr(self, name) is UNKNOWN)


_FIELDS: Final[tuple[tuple[int, str, str], ...]] = tuple(
    (number, field.name, str(field.type)) for number, field in enumerate(dataclasses.fields(NamespaceRecord), 1)
)
"""(field number, name, annotation). The order of the dataclass is the order of encoding; append only, with a
new RECORD_VERSION."""


def _check_field(name: str, kind: str, value: object, number: int) -> None:
    if value is UNKNOWN and kind in ("Text", "Count"):
        return
    where = f"namespace record: {name} (field {number})"
    if kind in ("str", "Text"):
        if not isinstance(value, str):
            raise UserError(f"{where} is {type(value).__name__}, not text")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise UserError(f"{where} cannot be written as UTF-8") from None
        if size > TEXT_BYTES_MAX:
            raise UserError(f"{where} is {size} bytes long, more than {TEXT_BYTES_MAX}")
    elif kind == "bytes":
        if not isinstance(value, bytes):
            raise UserError(f"{where} is {type(value).__name__}, not bytes")
        if len(value) > SALT_BYTES_MAX:
            raise UserError(f"{where} is {len(value)} bytes long, more than {SALT_BYTES_MAX}")
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise UserError(f"{where} is {value!r}, not a whole number of at least 0")


def _encode_value(value: str | bytes | int | Unknown) -> tuple[int, bytes]:
    if isinstance(value, Unknown):
        return _TAG_UNKNOWN, b""
    if isinstance(value, str):
        return _TAG_TEXT, value.encode()
    if isinstance(value, bytes):
        return _TAG_BYTES, value
    return _TAG_UINT, _UINT.pack(value)


def _decode_fields(encoded: bytes) -> dict[str, Any]:
    if len(encoded) > RECORD_BYTES_MAX:
        raise UserError(f"namespace record: {len(encoded)} bytes, more than {RECORD_BYTES_MAX}")
    if len(encoded) < _HEAD.size or encoded[: len(_MAGIC)] != _MAGIC:
        raise UserError("namespace record: these bytes are not one")
    _magic, version, count = _HEAD.unpack_from(encoded)
    if version != RECORD_VERSION or count != len(_FIELDS):
        raise UserError(
            f"namespace record: version {version} with {count} fields; "
            f"this side knows version {RECORD_VERSION} with {len(_FIELDS)}"
        )
    fields: dict[str, Any] = {}
    at = _HEAD.size
    for number, name, _kind in _FIELDS:
        if at + _FIELD.size > len(encoded):
            raise UserError(f"namespace record: cut off before {name} (field {number})")
        found, tag, length = _FIELD.unpack_from(encoded, at)
        at += _FIELD.size
        if found != number or at + length > len(encoded):
            raise UserError(f"namespace record: field {number} ({name}) is missing or cut off")
        fields[name] = _decode_value(tag, encoded[at : at + length], name)
        at += length
    if at != len(encoded):
        raise UserError(f"namespace record: {len(encoded) - at} bytes follow the last field")
    return fields


def _decode_value(tag: int, value: bytes, name: str) -> str | bytes | int | Unknown:
    if tag == _TAG_UNKNOWN and not value:
        return UNKNOWN
    if tag == _TAG_TEXT:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise UserError(f"namespace record: {name} is not UTF-8") from None
    if tag == _TAG_BYTES:
        return value
    if tag == _TAG_UINT and len(value) == _UINT.size:
        return int(_UINT.unpack(value)[0])
    raise UserError(f"namespace record: {name} has type {tag} and {len(value)} bytes")


# ------------------------------------------------------------------------------------------------- block keys


def block_key(
    namespace_digest: bytes,
    parent_key: bytes | None,
    tokens: Tokens | None = None,
    *,
    engine_hash: bytes | None = None,
    extra: bytes = b"",
) -> bytes:
    """The 16-byte key of one block: BLAKE2b keyed with the namespace, over the parent's key and either the
    block's token ids (each 0 to 2**32 - 1) or the engine's own hash of the block.

    `parent_key` is None for the first block of a sequence. `extra` is what else the engine mixes in, such as
    digests of the images behind placeholder tokens. Raises UserError.
    """
    if (tokens is None) is (engine_hash is None):
        raise UserError("a block key takes either token ids or the engine's block hash")
    if tokens is not None:
        source, payload = _SOURCE_TOKENS, _token_bytes(tokens)
    else:
        source, payload = _SOURCE_ENGINE_HASH, bytes(engine_hash or b"")
    if not payload:
        raise UserError("a block key needs at least one token, or a hash that is not empty")
    digest = _keyed(namespace_digest)
    digest.update(_block_head(source, parent_key, len(payload), extra))
    digest.update(payload)
    digest.update(extra)
    return digest.digest()


def block_keys(
    namespace_digest: bytes,
    tokens: Tokens,
    block_tokens: int,
    *,
    parent_key: bytes | None = None,
    extras: Sequence[bytes] | None = None,
) -> list[bytes]:
    """Keys of all whole blocks of a prefix, in order; a last block that is not full has no key.

    `extras` holds one byte string a block where the engine mixes in more than token ids. Same keys as calling
    `block_key` block by block. Raises UserError.
    """
    if block_tokens < 1:
        raise UserError(f"block_tokens is {block_tokens}, not at least 1")
    encoded = _token_bytes(tokens)
    step = 4 * block_tokens
    count = len(encoded) // step
    if extras is not None and len(extras) != count:
        raise UserError(f"{len(extras)} extras for {count} whole blocks")
    base = _keyed(namespace_digest)
    keys: list[bytes] = []
    for index in range(count):
        extra = b"" if extras is None else extras[index]
        digest = base.copy()
        digest.update(
            _block_head(_SOURCE_TOKENS, parent_key, step, extra) + encoded[index * step : (index + 1) * step] + extra
        )
        parent_key = digest.digest()
        keys.append(parent_key)
    return keys


def _keyed(namespace_digest: bytes) -> hashlib.blake2b:
    if len(namespace_digest) != DIGEST_BYTES:
        raise UserError(f"a namespace digest is {DIGEST_BYTES} bytes, not {len(namespace_digest)}")
    return hashlib.blake2b(key=namespace_digest, digest_size=KEY_BYTES, person=_KEY_PERSON)


def _block_head(source: int, parent_key: bytes | None, payload_bytes: int, extra: bytes) -> bytes:
    if parent_key is not None and len(parent_key) != KEY_BYTES:
        raise UserError(f"a parent key is {KEY_BYTES} bytes, not {len(parent_key)}")
    if len(extra) > EXTRA_BYTES_MAX:
        raise UserError(f"extra is {len(extra)} bytes, more than {EXTRA_BYTES_MAX}")
    return _BLOCK_HEAD.pack(source, parent_key is not None, parent_key or _NO_PARENT, payload_bytes, len(extra))


def _token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian u32."""
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"token ids are one row of whole numbers, not {array.ndim}-dimensional {array.dtype}")
    if array.dtype != np.uint32 and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise UserError("a token id lies outside 0 to 2**32 - 1")
    return array.astype("<u4", copy=False).tobytes()
