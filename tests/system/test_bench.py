"""The benchmark on real pods, quick: it measures everything it says, finds no wrong byte, and leaves no block."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from common.config import load_file
from common.wire import StatId
from emulator.compare import bench_pod, page_cache_bytes
from emulator.pod import Pod
from emulator.pod_settings import FABRICS, PodSettings
from host_agent.bench import fio
from host_agent.bench.environment import missing, read_environment
from host_agent.bench.report import print_report, report, write_report
from host_agent.bench.run import Bench
from host_agent.bench.settings import OPERATIONS, BenchSettings
from host_agent.bench.target import Target
from host_agent.client import Client
from host_agent.config import AgentSettings
from host_agent.memory import Spans

if TYPE_CHECKING:
    from tests.system.conftest import Place

SIZE = 64 << 10


@pytest.fixture(autouse=True)
def _without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each of its starts; what it does has tests of its own."""
    monkeypatch.setattr(fio, "version", lambda: "")


def _quick(place: Place, **changes: object) -> BenchSettings:
    values = {
        "block_bytes": (SIZE,),
        "batches": (1, 8),
        "lookup_batches": (1, 8),
        "rounds": 2,
        "blocks": 8,
        "small_calls": 8,
        "mixed_block_bytes": SIZE,
        "mixed_batch": 8,
        "mixed_calls": 12,
        "memory_bytes": 16 * SIZE,
        "flash_dir": place.flash_dir,
        "may_evict": True,
        **changes,
    }
    return BenchSettings(**values)  # type: ignore[arg-type]


@contextlib.contextmanager
def _targets(place: Place, settings: BenchSettings, fabrics: tuple[str, ...], stack: contextlib.ExitStack):  # type: ignore[no-untyped-def]
    targets = []
    with stack:
        for fabric in fabrics:
            run_dir = place.run_dir.with_name(f"run-{fabric}")
            pod = Pod.up(
                bench_pod(
                    PodSettings(dpus=1, regions=2, fabric=fabric, run_dir=run_dir, flash_dir=place.flash_dir), settings
                )
            )
            stack.callback(pod.down)
            client = stack.enter_context(Client(load_file(pod.state.agent_config, AgentSettings)))
            targets.append(Target(fabric, client, SIZE, [process.pid for process in pod.running()]))
        yield targets


def test_everything_is_measured_on_both_fabrics_and_no_block_is_left(place: Place, tmp_path: Path) -> None:
    settings = _quick(place)
    with _targets(place, settings, FABRICS, contextlib.ExitStack()) as targets:
        result = Bench(targets, settings, lambda _text: None).run()
        used = [stats[StatId.SLOTS_USED] for target in targets for stats in target.client.stat().values()]
    assert used == [0, 0, 0, 0]
    assert result["wrong"] == []
    cells = {(cell["target"], cell["operation"], cell["batch"]): cell for cell in result["cells"]}
    bulk = ("store_staged", "store_flash", "retrieve_staged", "lease_read", "retrieve_cold", "lookup")
    wanted = {(fabric, name, batch) for fabric in FABRICS for name in bulk for batch in (1, 8)}
    wanted |= {(fabric, "retrieve_small", 1) for fabric in FABRICS}
    wanted |= {(fabric, f"mixed_{name}", 8) for fabric in FABRICS for name in ("retrieve", "store")}
    assert set(cells) == wanted
    limits = {
        "store_flash": {"disk_write", "disk_first_write"},
        "retrieve_cold": {"disk_read"},
        "lookup": {"ping"},
        "retrieve_small": {"ping"},
    }
    for (_fabric, name, _batch), cell in cells.items():
        assert cell["notes"] == []
        assert cell["other_answers"] == {}
        assert len(cell["rate"]["rounds"]) == 2
        assert cell["rate"]["median"] > 0
        assert cell["cpu_s_per_unit"]["agent"]["median"] > 0
        if not name.startswith("mixed"):
            way = "push" if name.startswith("store") else "pull"
            assert set(cell["of"]) == limits.get(name, {"memmove", f"socket_{way}", f"cubic_{way}"})
    mixed = cells["emu-shm", "mixed_retrieve", 8]["facts"]
    assert 0 < mixed["hit_rate"]["median"] < 1
    assert mixed["evictions"]["max"] > 0

    document = report(read_environment(), result)
    assert missing(document) == []
    files = write_report(document, tmp_path / "out", "Title")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == document
    markdown = (tmp_path / "out" / "report.md").read_text()
    for word in ("# Title", "commit:", "STORE staged", "RETRIEVE cold", "READ of leased", "hit rate", "of memmove"):
        assert word in markdown
    assert all(path.exists() for path in files)
    text = io.StringIO()
    print_report(document, Console(file=text, width=80))
    for word in ("STORE staged", "LOOKUP", "64KiB", "memmove", "checksums are on", "fio is not installed"):
        assert word in " ".join(text.getvalue().split())
    assert "…" not in text.getvalue(), "it fits 80 columns"


def test_a_wrong_byte_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that turns one byte after the load is caught, though the checksums within the call agreed."""
    settings = _quick(place, batches=(8,), operations=("retrieve_staged",), rounds=1)
    with _targets(place, settings, ("emu-shm",), contextlib.ExitStack()) as targets:
        (target,) = targets
        honest = target.client.retrieve

        def dishonest(namespace: object, keys: object, memory: Spans, **options: object) -> object:
            results = honest(namespace, keys, memory, **options)
            target.client.core.memories.resolve(memory).pieces(3)[0][5] ^= 1
            return results

        monkeypatch.setattr(target.client, "retrieve", dishonest)
        result = Bench(targets, settings, lambda _text: None).run()
    assert len(result["wrong"]) == settings.passes(SIZE, 8) == 8, "one in every pass"
    assert f"of {SIZE} bytes differs at byte 0" in result["wrong"][0]


def test_what_is_not_allowed_or_does_not_fit_is_said(place: Place) -> None:
    settings = _quick(place, batches=(8,), operations=("retrieve_cold", "mixed"), rounds=1, blocks=40)
    crowded = PodSettings(
        dpus=1, regions=1, slot_bytes=SIZE, window_bytes=16 * SIZE, capacity_bytes=96 * SIZE,
        run_dir=place.run_dir, flash_dir=place.flash_dir,
    )  # fmt: skip
    pod = Pod.up(crowded)
    try:
        with Client(load_file(pod.state.agent_config, AgentSettings)) as client:
            asked = BenchSettings(**{**settings.__dict__, "may_evict": False, "block_bytes": (SIZE, 4 * SIZE)})
            result = Bench([Target("pod", client, SIZE)], asked, lambda _text: None).run()
    finally:
        pod.down()
    notes = {cell["operation"]: cell["notes"] for cell in result["cells"]}
    assert "to fill the windows takes" in notes["retrieve_cold"][0]
    assert "would be evicted" in notes["mixed_retrieve"][0]
    assert result["too_large_bytes"] == [4 * SIZE]


def test_the_page_cache_is_seen(place: Place) -> None:
    place.flash_dir.mkdir(parents=True)
    path = place.flash_dir / "file"
    path.write_bytes(bytes(1 << 20))
    assert page_cache_bytes(path) == 1 << 20


def test_the_command_writes_a_report_with_goals(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "report"
    words = ["--quick", "--rounds", "1", "--block", "64KiB", "--case", "store_flash", "--case", "retrieve_staged"]
    done = place.emu("bench", *words, "--region-slots", "4096", "--json", "--out", str(out), *place.options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "report.json").read_text())
    assert {cell["target"] for cell in document["cells"]} == set(FABRICS)
    assert {cell["operation"] for cell in document["cells"]} <= set(OPERATIONS)
    assert document["page_cache"].startswith("regions and the disk's limit use O_DIRECT; of the 4 flash files 0 bytes")
    outcomes = {line["key"]: line["outcome"] for line in document["goals"]}
    assert outcomes["lookup"] == "not measured"
    assert outcomes["index-memory"] != "not measured"
    assert "## Goals" in (out / "report.md").read_text()
    assert place.left() == []


def test_any_pod_that_is_up_can_be_measured(place: Place, tmp_path: Path) -> None:
    pod = Pod.up(
        bench_pod(PodSettings(dpus=1, regions=1, run_dir=place.run_dir, flash_dir=place.flash_dir), _quick(place))
    )
    try:
        words = ["--quick", "--block", "64KiB", "--batch", "2", "--blocks", "4", "--rounds", "1"]
        words += ["--case", "store_staged", "--case", "lookup"]
        command = [sys.executable, "-m", "host_agent.cli", "--config", str(pod.state.agent_config), "bench", *words]
        done = subprocess.run(
            [*command, "--lookup-batch", "2", "--out", str(tmp_path / "out")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        pod.down()
    assert done.returncode == 0, done.stderr
    assert "STORE staged" in done.stdout
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {(cell["target"], cell["operation"]) for cell in document["cells"]} == {
        ("pod", "store_staged"),
        ("pod", "lookup"),
    }
    assert "dpu" not in document["cells"][0]["cpu_s_per_unit"], "whose processes they are is not known"
    assert document["limit_methods"]["disk"].startswith("not measured")
