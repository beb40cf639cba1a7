"""The generated workload: the same for one seed, with the reuse that it claims, and keys that chain."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from common.errors import UserError
from common.models import model_geometry
from emulator.trace import TraceRecord, hash_id_count
from emulator.workload import BlockShape, WorkloadGenerator, WorkloadSettings

LLAMA = model_geometry("Llama-3-8B")


def _records(count: int, **settings: float) -> list[TraceRecord]:
    return list(islice(WorkloadGenerator(WorkloadSettings(**settings)).records(), count))  # type: ignore[arg-type]


def _reuse(records: list[TraceRecord]) -> float:
    seen: set[int] = set()
    hits = total = 0
    for record in records:
        for hash_id in record.hash_ids:
            if hash_id not in seen:
                break
            hits += 1
        total += len(record.hash_ids)
        seen.update(record.hash_ids)
    return hits / total


def test_a_seed_repeats_and_another_differs() -> None:
    assert _records(200, seed=5) == _records(200, seed=5)
    assert _records(200, seed=5) != _records(200, seed=6)


def test_records_are_well_formed_and_in_order_of_time() -> None:
    records = _records(500)
    assert records == sorted(records, key=lambda record: record.timestamp_ms)
    for record in records:
        assert len(record.hash_ids) == hash_id_count(record.input_length)
        assert len(set(record.hash_ids)) == len(record.hash_ids)
        assert 0 < record.input_length <= 32768
        assert record.output_length > 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_statistics_are_those_of_chat(seed: int) -> None:
    records = _records(3000, seed=seed)
    outputs = [record.output_length for record in records]
    assert 250 < float(np.median(outputs)) < 310
    assert 0.6 < float(np.std(np.log(outputs))) < 0.8
    assert 2000 < float(np.median([record.input_length for record in records])) < 8000
    assert 0.4 < _reuse(records) < 0.9


def test_system_prompts_are_shared_by_popularity() -> None:
    records = _records(3000, system_prompt_tokens_median=2000)
    first = [count for _hash_id, count in Counter(record.hash_ids[0] for record in records).most_common(8)]
    assert first[0] > 2 * first[3] > 0


def test_a_second_turn_keeps_the_full_runs_of_the_first() -> None:
    records = _records(400)
    followed = 0
    for earlier, record in enumerate(records):
        full = record.hash_ids[: record.input_length // 512]
        for later in records[earlier + 1 :]:
            if len(full) > 4 and later.hash_ids[:5] == full[:5] and later.input_length > record.input_length:
                assert later.hash_ids[: len(full)] == full
                followed += 1
                break
    assert followed > 50


def test_a_block_is_one_page_of_all_layers() -> None:
    assert BlockShape(LLAMA, tp_size=1).block_bytes == 2 << 20
    assert BlockShape(LLAMA).block_bytes == 256 << 10
    assert BlockShape(LLAMA, block_tokens=64).block_bytes == 1 << 20
    assert BlockShape(LLAMA).layer_pieces == 32
    with pytest.raises(UserError, match="80 layers"):
        assert BlockShape(model_geometry("Llama-3-70B")).layer_pieces
    with pytest.raises(UserError, match="whole pages"):
        BlockShape(LLAMA, block_tokens=24)
    with pytest.raises(UserError, match="do not divide"):
        BlockShape(LLAMA, block_tokens=48)


def test_keys_follow_the_prefix_and_cover_whole_blocks_only() -> None:
    shape = BlockShape(LLAMA)
    digest = shape.namespace("demo").digest()
    short = shape.block_keys(digest, TraceRecord(0, 1000, 1, (7, 8)))
    longer = shape.block_keys(digest, TraceRecord(9, 1500, 1, (7, 8, 9)))
    other = shape.block_keys(digest, TraceRecord(9, 1500, 1, (6, 8, 9)))
    assert len(short) == 62
    assert longer[:62] == short
    assert len(longer) == 93
    assert not set(other) & set(longer), "a key names its whole prefix"
    assert shape.block_keys(digest, TraceRecord(0, 15, 1, (7,))) == []
    assert shape.namespace("other").digest() != digest
