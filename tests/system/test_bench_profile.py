"""`entresol-emu bench-profile` on a real pod: figures for each path and side, and a report."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from emulator.cli import main
from host_agent.bench.environment import missing


def test_every_path_is_measured_on_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["bench-profile", "--quick", "--fabric", "emu-shm", "--flash-dir", str(tmp_path), "--out", str(out)]
    done = CliRunner(env={"XDG_RUNTIME_DIR": str(tmp_path)}).invoke(main, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads((out / "report.json").read_text())
    assert missing(document) == []
    paths = {row["path"]: row for row in document["paths"]}
    assert {name.split()[0] for name in paths} == {"LOOKUP", "RETRIEVE", "STORE"}
    for row in paths.values():
        assert row["p50_us"] > 0
        assert min(row["cpu_us"].values()) > 0
        if not document["missing_tools"]:
            assert row["functions"]["agent"]
    text = (out / "report.md").read_text()
    assert all(name in text for name in paths)
