"""Request traces in the Mooncake format: one JSON object a line.

Owns the record type, its reader and its writer; never decides what to replay (`emulator.workload`, `emulator.demo`).
A record says when a request came, how many tokens went in and out, and which prefix blocks its input is made of:
one hash id per started run of HASH_TOKENS tokens, where equal ids mean the same tokens after the same prefix.
The format carries no user content; https://github.com/kvcache-ai/Mooncake describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple, TextIO

from common.errors import UserError

HASH_TOKENS = 512
"""Tokens that one hash id stands for; the last id of a request may stand for fewer."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceRecord(NamedTuple):
    """One request."""

    timestamp_ms: int
    """From the start of the trace."""
    input_length: int
    """Tokens of the prompt, conversation so far included."""
    output_length: int
    """Tokens generated."""
    hash_ids: tuple[int, ...]
    """ceil(input_length / HASH_TOKENS) ids."""


def hash_id_count(input_length: int) -> int:
    """How many hash ids a prompt of so many tokens has."""
    return -(-input_length // HASH_TOKENS)


def parse_record(line: str, where: str) -> TraceRecord:
    """One line of a trace. Fields that the format does not name are ignored, as other tools add their own.

    Raises UserError that starts with `where`, such as ``trace.jsonl:17``.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not a JSON object: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise UserError(f"{where}: not a trace record: nested too deeply") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: a trace record is a JSON object, this is {type(value).__name__}")
    missing = [field for field in _FIELDS if field not in value]
    if missing:
        raise UserError(f"{where}: field {missing[0]!r} is missing (a record has {', '.join(_FIELDS)})")
    for field in _FIELDS[:3]:
        if not _is_count(value[field]):
            raise UserError(f"{where}: {field} must be a whole number from 0 to 2**64 - 1, not {value[field]!r:.40}")
    ids = value["hash_ids"]
    if not isinstance(ids, list) or not all(_is_count(item) for item in ids):
        raise UserError(f"{where}: hash_ids must be a list of whole numbers from 0 to 2**64 - 1")
    expected = hash_id_count(value["input_length"])
    if len(ids) != expected:
        raise UserError(
            f"{where}: {value['input_length']} input tokens have {expected} hash ids of {HASH_TOKENS} tokens, "
            f"but {len(ids)} are listed"
        )
    return TraceRecord(value["timestamp"], value["input_length"], value["output_length"], tuple(ids))


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """The records of a file, one line at a time; blank lines are skipped.

    Raises UserError naming file and line for what cannot be read or is no record.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number in count(1):
                line = _next_line(file, f"{path}:{number}")
                if line is None:
                    return
                if line.strip():
                    yield parse_record(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"trace {path} cannot be read: {error.strerror}") from error


def write_trace(path: Path, records: Iterable[TraceRecord]) -> int:
    """Write a file that `read_trace` reads back equal. Returns the number of records. Raises UserError."""
    written = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            for record in records:
                values = (record.timestamp_ms, record.input_length, record.output_length, list(record.hash_ids))
                file.write(json.dumps(dict(zip(_FIELDS, values, strict=True))) + "\n")
                written += 1
    except OSError as error:
        raise UserError(f"trace {path} cannot be written: {error.strerror}") from error
    return written


def select_conversations(records: Iterable[TraceRecord], requests: int, shared_by_min: int = 32) -> list[TraceRecord]:
    """About the first `requests` records that keep a trace's reuse: whole conversations instead of its head.

    The head of a trace holds the first turns of many conversations and hardly a second one. Here conversations are
    told apart by the first hash id that fewer than `shared_by_min` records have (ids shared by more are system
    prompts), those that have a second turn are taken in order of arrival until `requests` records are reached, and
    the records come back in their order in time. A trace without such conversations gives its head.
    """
    everything = list(records)
    if len(everything) <= requests:
        return everything
    popularity: dict[int, int] = {}
    for record in everything:
        for hash_id in set(record.hash_ids):
            popularity[hash_id] = popularity.get(hash_id, 0) + 1
    turns: dict[int, list[int]] = {}
    for index, record in enumerate(everything):
        shared = sum(1 for _ in takewhile(lambda item: popularity[item] >= shared_by_min, record.hash_ids))
        if shared < len(record.hash_ids):
            turns.setdefault(record.hash_ids[shared], []).append(index)
    chosen: list[int] = []
    for indices in turns.values():
        if len(indices) > 1:
            chosen += indices[: requests - len(chosen)]
        if len(chosen) >= requests:
            break
    if len(chosen) < requests:
        taken = set(chosen)
        chosen += [index for index in range(len(everything)) if index not in taken][: requests - len(chosen)]
    return [everything[index] for index in sorted(chosen)]


def _next_line(file: TextIO, where: str) -> str | None:
    try:
        return file.readline() or None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
