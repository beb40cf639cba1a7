"""Traces: what is written reads back equal, and what is wrong is said with file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.errors import UserError
from emulator.trace import TraceRecord, parse_record, read_trace, select_conversations, write_trace

GOOD = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}


def test_written_records_read_back_equal(tmp_path: Path) -> None:
    records = [TraceRecord(0, 513, 7, (1, 2)), TraceRecord(3000, 512, 0, (1,)), TraceRecord(3000, 0, 1, ())]
    path = tmp_path / "trace.jsonl"
    assert write_trace(path, records) == 3
    assert list(read_trace(path)) == records


def test_blank_lines_and_unknown_fields_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + json.dumps({**GOOD, "model": "x"}) + "\n\n")
    assert list(read_trace(path)) == [TraceRecord(27482, 1100, 52, (46, 47, 2353))]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a"),
        ("[1]", "list"),
        ("17", "int"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "hash_ids"}), "'hash_ids' is missing"),
        (json.dumps({**GOOD, "timestamp": "0"}), "timestamp must be a whole number"),
        (json.dumps({**GOOD, "timestamp": True}), "timestamp must be a whole number"),
        (json.dumps({**GOOD, "output_length": 1.5}), "output_length must be a whole number"),
        (json.dumps({**GOOD, "input_length": -1}), "input_length must be a whole number"),
        (json.dumps({**GOOD, "input_length": 1 << 70}), "input_length must be a whole number"),
        (json.dumps({**GOOD, "hash_ids": {"0": 1}}), "hash_ids must be a list"),
        (json.dumps({**GOOD, "hash_ids": [1, None, 3]}), "hash_ids must be a list"),
        (json.dumps({**GOOD, "hash_ids": [1, 2]}), "1100 input tokens have 3 hash ids of 512 tokens, but 2 are listed"),
        (json.dumps({**GOOD, "hash_ids": [1, 2, 3, 4]}), "but 4 are listed"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    records = read_trace(path)
    next(records)
    with pytest.raises(UserError) as caught:
        next(records)
    assert f"{path}:2: " in str(caught.value)
    assert said in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"trace\.jsonl:1: not UTF-8"):
        list(read_trace(path))


def test_a_missing_file_and_a_directory_are_user_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            list(read_trace(path))
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(tmp_path / "absent" / "trace.jsonl", [])


def test_selection_prefers_whole_conversations_and_keeps_the_order_of_time() -> None:
    system = tuple(range(2))
    records: list[TraceRecord] = []
    for number in range(100):  # every tenth conversation has a second turn, long after the first
        first = 1000 + 10 * number
        records.append(TraceRecord(number, 3 * 512, 1, (*system, first)))
        if number % 10 == 0:
            records.append(TraceRecord(1000 + number, 4 * 512, 1, (*system, first, first + 1)))
    records.sort()
    chosen = select_conversations(records, 10)
    assert len(chosen) == 10
    assert chosen == sorted(chosen)
    first_ids = [record.hash_ids[2] for record in chosen]
    assert all(first_ids.count(hash_id) == 2 for hash_id in first_ids)


def test_selection_of_a_trace_without_conversations_is_its_head() -> None:
    records = [TraceRecord(number, 512, 1, (number,)) for number in range(50)]
    assert select_conversations(records, 7) == records[:7]
    assert select_conversations(records, 500) == records
    assert select_conversations([], 5) == []


def test_parse_record_starts_with_where() -> None:
    with pytest.raises(UserError, match=r"^here:7: "):
        parse_record("null", "here:7")


def test_a_public_trace_reads_whole() -> None:
    """Set ENTRESOL_TRACE to a file of the published traces to run this."""
    name = os.environ.get("ENTRESOL_TRACE")
    if not name:
        pytest.skip("ENTRESOL_TRACE does not name a trace file")
    records = list(read_trace(Path(name)))
    assert len(records) > 1000
    chosen = select_conversations(records, 100)
    assert len(chosen) == 100
    assert chosen == sorted(chosen, key=lambda record: record.timestamp_ms)
