"""The benchmark on real pods, quick: it measures everything it says, finds no wrong byte, and leaves no block."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from common.config import load_file
from common.wire import StatId
from emulator.compare import bench_pod
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.bench.report import print_bench
from host_agent.bench.run import Bench, BenchSettings
from host_agent.client import Client
from host_agent.config import AgentSettings

if TYPE_CHECKING:
    from tests.system.conftest import Place

QUICK = BenchSettings(block_bytes=(64 << 10,), batches=(1, 8), lookup_batches=(1, 8), rounds=2, blocks=8)


@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
def test_a_quick_run_measures_everything_and_deletes_its_blocks(place: Place, fabric: str) -> None:
    settings = PodSettings(dpus=1, regions=2, fabric=fabric, run_dir=place.run_dir, flash_dir=place.flash_dir)
    quick = dataclasses.replace(QUICK, flash_dir=place.flash_dir)
    pod = Pod.up(bench_pod(settings, quick))
    try:
        with Client(load_file(pod.state.agent_config, AgentSettings)) as client:
            result = Bench(client, quick, "demo", lambda _text: None).run()
            used = [stats[StatId.SLOTS_USED] for stats in client.stat().values()]
    finally:
        pod.down()
    assert used == [0, 0]
    assert result["wrong"] == []
    cells = {(cell["operation"], cell["batch"]): cell for cell in result["cells"]}
    assert set(cells) == {
        (name, batch) for name in ("store_staged", "retrieve_staged", "retrieve_cold") for batch in (1, 8)
    }
    for cell in cells.values():
        assert cell["note"] == ""
        assert cell["other_answers"] == {}
        assert cell["calls"] == 2 * 8 // cell["batch"]
        assert cell["gb_per_s"] > 0
    assert set(cells["store_staged", 8]["of"]) == {"memmove", "socket_push"}
    assert set(cells["retrieve_staged", 1]["of"]) == {"memmove", "socket_pull"}
    assert set(cells["retrieve_cold", 8]["of"]) == {"flash", "socket_pull"}
    trips = [(row["operation"], row["batch"]) for row in result["round_trips"]["rows"]]
    assert trips == [("lookup", 1), ("lookup", 8), ("retrieve", 1)]
    json.dumps(result)
    text = io.StringIO()
    print_bench(result, Console(file=text, width=80), fabric)
    for word in ("STORE staged", "RETRIEVE cold", "LOOKUP", "64KiB", "memmove", "checksums are on"):
        assert word in text.getvalue()
    assert "…" not in text.getvalue(), "it fits 80 columns"


def test_both_fabrics_in_one_report(place: Place) -> None:
    done = place.emu("bench", "--quick", "--rounds", "1", "--json", *place.options)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert list(results) == ["emu-shm", "emu-tcp"]
    assert all(result["cells"] and not result["wrong"] for result in results.values())
    assert place.left() == []
