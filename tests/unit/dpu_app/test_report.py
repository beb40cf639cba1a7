"""Tables of `entresol-dpu`: one line a region, whatever the terminal; the state of a DPU fits 80 columns."""

from __future__ import annotations

import pytest

from common.proto.entresol.v1 import control_pb2
from dpu_app import pause_report, report

REGION = control_pb2.Region(
    name="region0",
    uuid=bytes(range(16)),
    state=control_pb2.REGION_STATE_DRAINING,
    slot_bytes=2 << 20,
    slots=5_000_000,
    capacity_bytes=10 << 40,
    generation=12,
    fabrics=[control_pb2.FabricEndpoint(name="f", address="/a/rather/long/path/of/a/state/directory/region0.sock")],
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_status_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stats = {"RETRIEVES": 1_000_000, "RETRIEVE_MISSES": 1, "SLOTS_USED": 4_999_999}
    answer = control_pb2.GetStatusResponse(dpu=control_pb2.Identity(name="dpu0", version="0.1.0"), pid=7)
    answer.regions.add(region=REGION, stats=stats, worker_pid=12345)
    report.print_status(report.console(), answer)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "999999/1000000" in lines[2]


def test_a_region_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_regions(report.console(), [REGION])
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["region", "state", "uuid", "slot", "slots", "capacity", "generation", "address"]
    assert f" {REGION.uuid.hex()} " in line
    assert REGION.fabrics[0].address in line


PAUSES = control_pb2.RegionPauses(
    region="region0",
    worker_pid=12345,
    bounds_ns=[1000, 2000, 5000, 10_000_000],
    turns=[0, 7, 0, 2, 0],
    own=[0, 8, 0, 1, 0],
    parts=[control_pb2.PausePart(cause="flash", counts=[0, 0, 0, 1, 0], total_ns=9_000_000)],
    longest=[
        control_pb2.LongPause(
            duration_ns=9_000_000, waited_ns=1_500_000, ago_ns=3_000_000_000, parts_ns={"gc": 1, "flash": 8_999_999}
        )
    ],
)


def test_pauses_are_a_histogram_and_the_longest_with_their_cause(capsys: pytest.CaptureFixture[str]) -> None:
    pause_report.print_pauses(report.console(), [PAUSES])
    lines = capsys.readouterr().out.splitlines()
    assert "region0" in lines[0]
    assert "12345" in lines[0]
    assert lines[1].split() == ["turn", "turns", "own", "flash"]
    assert [line.split() for line in lines[2:5]] == [
        ["<=", "2us", "7", "8"],
        ["<=", "5us"],
        ["<=", "10ms", "2", "1", "1"],
    ]
    assert lines[5].strip() == "9ms, 1.5ms of it without a processor, 3s ago: flash 9ms, gc 1ns"


def test_pauses_for_scripts() -> None:
    values = pause_report.pause_values(PAUSES)
    assert values["turns"] == [0, 7, 0, 2, 0]
    assert values["parts"] == {"flash": [0, 0, 0, 1, 0]}
    assert values["longest"][0]["parts_ns"] == {"gc": 1, "flash": 8_999_999}


@pytest.mark.parametrize(("ns", "text"), [(7, "7ns"), (1_250, "1.25us"), (2_000_000, "2ms"), (1_500_000_000, "1.5s")])
def test_durations_have_a_unit(ns: int, text: str) -> None:
    assert pause_report.duration(ns) == text
