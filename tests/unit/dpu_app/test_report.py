"""Tables of `entresol-dpu`: one line a region, whatever the terminal; the state of a DPU fits 80 columns."""

from __future__ import annotations

import pytest

from common.proto.entresol.v1 import control_pb2
from dpu_app import report

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
