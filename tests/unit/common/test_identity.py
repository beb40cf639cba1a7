"""The identity of a block is the same everywhere and for ever, and nothing that matters is left out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.identity import UNKNOWN, NamespaceRecord, block_key, block_keys

GOLDEN = Path(__file__).parents[2] / "golden" / "identity" / "vectors.json"
FIELDS: dict[str, Any] = {
    "tenant": "acme",
    "salt": b"\x00\x01",
    "model_id": "meta-llama/Meta-Llama-3-8B",
    "weights_revision": "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920",
    "lora_id": "",
    "lora_revision": "",
    "kv_dtype": "bfloat16",
    "quantisation": "",
    "layout": "vllm-LBHNC-vec",
    "page_tokens": 16,
    "block_tokens": 128,
    "layers": 32,
    "kv_heads": 8,
    "head_size": 128,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "cp_rank": 0,
    "cp_size": 1,
}
RECORD = NamespaceRecord(**FIELDS)


def _replace(**changes: Any) -> NamespaceRecord:
    return NamespaceRecord(**{**FIELDS, **changes})


OTHER: dict[str, Any] = {"salt": b"\x00", "tp_size": 2, "pp_size": 2, "cp_size": 2, "block_tokens": 256}


def _changed(name: str) -> NamespaceRecord:
    if name.endswith("_rank"):
        size = name.replace("_rank", "_size")
        return _replace(**{size: 2, name: 1})
    if name == "page_tokens":
        return _replace(page_tokens=32)
    value = OTHER.get(name)
    if value is None:
        value = FIELDS[name] + ("x" if isinstance(FIELDS[name], str) else 1)
    return _replace(**{name: value})


def test_golden_vectors() -> None:
    for vector in json.loads(GOLDEN.read_text()):
        fields: dict[str, Any] = {k: UNKNOWN if v is None else v for k, v in vector["record"].items()}
        fields["salt"] = bytes.fromhex(fields["salt"])
        record = NamespaceRecord(**fields)
        assert record.to_bytes().hex() == vector["encoded"]
        assert record.digest().hex() == vector["digest"]
        keys = block_keys(record.digest(), vector["tokens"], vector["block_tokens"])
        assert [key.hex() for key in keys] == vector["keys"]
        hashed = block_key(record.digest(), keys[0], engine_hash=b"\x01\x02\x03", extra=b"image")
        assert hashed.hex() == vector["engine_hash_key"]


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_field_changes_the_digest(name: str) -> None:
    assert _changed(name).digest() != RECORD.digest()


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("tenant", "salt")])
def test_unknown_is_a_value_of_its_own(name: str) -> None:
    record = _replace(**{name: UNKNOWN})
    assert record.unknown_fields() == (name,)
    assert NamespaceRecord.from_bytes(record.to_bytes()) == record
    assert record.digest() != RECORD.digest()
    if isinstance(FIELDS[name], str):
        assert record.digest() != _replace(**{name: "unknown"}).digest()
        assert record.digest() != _replace(**{name: "", "head_size": 1}).digest()


def test_no_field_may_be_left_out() -> None:
    for name in FIELDS:
        with pytest.raises(TypeError):
            NamespaceRecord(**{k: v for k, v in FIELDS.items() if k != name})


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": ""},
        {"tenant": UNKNOWN},
        {"tenant": b"acme"},
        {"salt": "text"},
        {"salt": b"x" * 65},
        {"model_id": None},
        {"model_id": "m" * 1025},
        {"model_id": "\ud800"},
        {"layers": -1},
        {"layers": 1 << 64},
        {"layers": True},
        {"layers": 32.0},
        {"tp_rank": 1},
        {"block_tokens": 24},
        {"page_tokens": 0},
    ],
)
def test_bad_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="namespace record"):
        _replace(**change)


def test_every_cut_and_every_flipped_bit_is_refused_or_another_record() -> None:
    encoded = RECORD.to_bytes()
    for cut in range(len(encoded)):
        with pytest.raises(UserError):
            NamespaceRecord.from_bytes(encoded[:cut])
    with pytest.raises(UserError):
        NamespaceRecord.from_bytes(encoded + b"\0")
    for bit in range(8 * len(encoded)):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            record = NamespaceRecord.from_bytes(bytes(damaged))
        except UserError:
            continue
        assert record.to_bytes() == damaged
        assert record.digest() != RECORD.digest()


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_kindly(junk: bytes) -> None:
    with pytest.raises(UserError):
        NamespaceRecord.from_bytes(junk)
    with pytest.raises(UserError):
        NamespaceRecord.from_bytes(RECORD.to_bytes()[:12] + junk)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(tenant=_text.filter(bool), model=st.one_of(_text, st.just(UNKNOWN)), salt=st.binary(max_size=64))
def test_encoding_round_trips(tenant: str, model: Any, salt: bytes) -> None:
    record = _replace(tenant=tenant, model_id=model, salt=salt)
    assert NamespaceRecord.from_bytes(record.to_bytes()) == record


def test_neighbouring_texts_do_not_run_into_each_other() -> None:
    one = _replace(model_id="ab", weights_revision="c")
    two = _replace(model_id="a", weights_revision="bc")
    assert one.digest() != two.digest()


# ---------------------------------------------------------------------------------------------------- block keys


def test_keys_of_a_prefix_are_the_chain_of_block_keys() -> None:
    digest = RECORD.digest()
    tokens = np.arange(1000, dtype=np.int64)
    keys = block_keys(digest, tokens, 128)
    assert len(keys) == 7
    parent = None
    for index, key in enumerate(keys):
        assert key == block_key(digest, parent, [int(t) for t in tokens[index * 128 : (index + 1) * 128]])
        parent = key
    assert keys[3:] == block_keys(digest, tokens[3 * 128 :], 128, parent_key=keys[2])
    assert block_keys(digest, tokens[:127], 128) == []


def test_type_of_the_token_array_does_not_matter() -> None:
    digest = RECORD.digest()
    tokens = list(range(64))
    expected = block_keys(digest, tokens, 32)
    for kind in ("<u4", ">u4", "<i8", ">i8", "u2"):
        assert block_keys(digest, np.array(tokens, kind), 32) == expected
    assert block_keys(digest, np.arange(128, dtype=np.int32)[::2] // 2, 32) == expected


def test_everything_that_goes_into_a_key_changes_it() -> None:
    digest = RECORD.digest()
    parent = bytes(16)
    keys = {
        block_key(digest, None, [1, 2, 3]),
        block_key(_changed("layout").digest(), None, [1, 2, 3]),
        block_key(digest, parent, [1, 2, 3]),
        block_key(digest, None, [1, 2]),
        block_key(digest, None, [1, 2, 3, 0]),
        block_key(digest, None, [1, 2, 3], extra=b"image"),
        block_key(digest, None, engine_hash=np.array([1, 2, 3], "<u4").tobytes()),
        block_key(digest, None, engine_hash=b"\1"),
        block_key(digest, None, engine_hash=b"\1\0"),
    }
    assert len(keys) == 9


def test_extras_of_a_prefix() -> None:
    digest = RECORD.digest()
    plain = block_keys(digest, range(64), 32)
    with_image = block_keys(digest, range(64), 32, extras=[b"", b"image"])
    assert with_image[0] == plain[0]
    assert with_image[1] == block_key(digest, plain[0], list(range(32, 64)), extra=b"image")
    with pytest.raises(UserError):
        block_keys(digest, range(64), 32, extras=[b""])


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], [[1, 2]], [], ["a"], [1 << 70]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(UserError):
        block_key(RECORD.digest(), None, tokens)


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(UserError):
        block_key(b"short", None, [1])
    with pytest.raises(UserError):
        block_key(RECORD.digest(), b"short", [1])
    with pytest.raises(UserError):
        block_key(RECORD.digest(), None)
    with pytest.raises(UserError):
        block_key(RECORD.digest(), None, [1], engine_hash=b"x")
    with pytest.raises(UserError):
        block_key(RECORD.digest(), None, engine_hash=b"")
    with pytest.raises(UserError):
        block_keys(RECORD.digest(), [1], 0)


def test_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "import ast, sys; from common.identity import NamespaceRecord, block_keys\n"
        "record = NamespaceRecord(**ast.literal_eval(sys.argv[1]))\n"
        "print(record.digest().hex(), *[k.hex() for k in block_keys(record.digest(), range(512), 128)])"
    )
    root = str(Path(__file__).parents[3])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, repr(FIELDS)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "4242")
    }
    expected = [RECORD.digest(), *block_keys(RECORD.digest(), range(512), 128)]
    assert outputs == {" ".join(key.hex() for key in expected) + "\n"}
