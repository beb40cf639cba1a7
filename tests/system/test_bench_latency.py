"""The latency benchmark on a real pod, quick: idle and beside stores, with the pauses; nothing stays behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from emulator.latency import PHASES, LatencySettings, measure_latency
from emulator.pod_settings import PodSettings
from host_agent.bench.environment import missing

if TYPE_CHECKING:
    from tests.system.conftest import Place


def test_latency_is_measured_idle_and_beside_stores(place: Place) -> None:
    latency = LatencySettings(
        rounds=1, idle_requests=100, load_requests=60, block_bytes=16 << 10, batch=16, slots=256, frames=64
    )
    report = measure_latency(PodSettings(run_dir=place.run_dir, flash_dir=place.flash_dir), latency, lambda _: None)
    assert missing(report) == []
    assert set(report["phases"]) == set(PHASES)
    for phase, requests in (("idle", 100), ("load", 60)):
        measured = report["phases"][phase]
        assert measured["wrong"] == 0
        assert [measured["latencies"][name]["count"] for name in ("RETRIEVE", "LOOKUP")] == [requests // 2] * 2
        assert sum(measured["pauses"]["turns"]) == sum(measured["pauses"]["own"]) >= requests
        assert measured["watch"]["count"] > 0
    assert report["phases"]["load"]["counters"]["EVICTIONS"] > 0
    assert report["phases"]["load"]["stores"][0]["statuses"]["OK"] > 0
    assert report["phases"]["idle"]["stores"] == []
    json.dumps(report)
    assert place.left() == []
