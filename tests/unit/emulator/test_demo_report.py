"""The demo's sums: what its nodes reported, added up once and printed whole."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from emulator.demo_report import Call, DemoReport, RequestOutcome, print_demo, summarise

SETUP = {
    "fabric": "emu-shm",
    "model": "Llama-3-8B",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
    "block_bytes": 1000,
    "tp_size": 8,
    "pieces": 1,
}


def _outcome(hits: int, wrong: list[str]) -> RequestOutcome:
    calls = {
        "store": [(4 - hits, (4 - hits) * 1000, 0.002)],
        "retrieve_staged": [(hits, hits * 1000, 0.001)],
        "retrieve_cold": [],
    }
    through_json = json.loads(json.dumps(calls))
    return RequestOutcome(70, 4, hits, 16 * hits, through_json, {"store EXISTS": 1}, wrong)


def _report(wrong: list[str]) -> DemoReport:
    report = DemoReport(setup=dict(SETUP))
    report.add(_outcome(1, []))
    report.add(_outcome(3, wrong))
    report.seconds = 2.0
    report.counters = {"STORE_BYTES": 4000, "FLASH_WRITE_BYTES": 4200, "TABLE_WRITE_BYTES": 200}
    return report


def test_the_sums() -> None:
    sums = _report([]).as_dict()
    assert sums["requests"] == 2
    assert sums["tokens"] == 140
    assert sums["block_hit_rate"] == 0.5
    assert sums["tokens_not_recomputed"] == 64
    assert sums["bytes_moved"] == 8000
    assert sums["other_answers"] == {"store EXISTS": 2}
    assert sums["flash"]["written_per_kv_byte"] == pytest.approx(1.05)
    assert sums["wrong_blocks"] == 0
    store = sums["operations"]["store"]
    assert (store["calls"], store["blocks"], store["bytes"]) == (2, 4, 4000)
    assert store["gb_per_s"] == pytest.approx(4000 / 0.004 / 1e9)
    assert sums["operations"]["retrieve_cold"]["calls"] == 0
    json.dumps(sums)


def test_percentiles_are_of_calls() -> None:
    summary = summarise([Call(1, 10, second / 1000) for second in range(1, 101)])
    assert summary["p50_ms"] == pytest.approx(50.5)
    assert summary["p99_ms"] == pytest.approx(99.01)
    assert summarise([])["gb_per_s"] == 0.0


@pytest.mark.parametrize(("wrong", "said"), [([], "is right"), (["block 00 differs at byte 8 of 1000"], "byte 8")])
def test_the_table_says_it_all(wrong: list[str], said: str) -> None:
    text = io.StringIO()
    print_demo(_report(wrong).as_dict(), Console(file=text, width=120))
    for word in ("block hit rate", "50.0%", "tokens not recomputed", "RETRIEVE cold", "per KV byte", "1.050", said):
        assert word in text.getvalue()
    if wrong:
        assert "is right" not in text.getvalue()


def test_nothing_at_all_is_no_division_by_zero() -> None:
    report = DemoReport(setup=dict(SETUP))
    assert report.as_dict()["block_hit_rate"] == 0.0
    print_demo(report.as_dict(), Console(file=io.StringIO()))
