"""The measurement of large regions does what it says, small: every figure is there, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from doca_shims.api import ShimError
from dpu_app.regions import measure_large
from dpu_app.regions.measure_large import check_room, lines, main
from dpu_app.regions.measure_speed import LOOKUP_BATCHES, Effort

EFFORT = Effort(1024, 50, 8)


def test_a_small_region_beside_a_smaller_one(tmp_path: Path) -> None:
    path = tmp_path / "flash"
    told: list[str] = []
    try:
        large = measure_large.measure_large(str(path), 20_000, 5000, EFFORT, told.append, driver="thread_pool")
    except ShimError as error:
        if "O_DIRECT" in error.detail:
            pytest.skip(str(error))
        raise
    assert not path.exists()
    assert [(state.slots, state.fraction) for state in large.states] == [
        (5000, 0.1),
        (5000, 0.9),
        (20_000, 0.1),
        (20_000, 0.9),
    ]
    for state in large.states:
        assert state.used == pytest.approx(state.fraction * state.slots, rel=0.1)
        assert set(state.speed.lookups) == {
            f"{name}, {batch}" for name in ("present", "absent") for batch in LOOKUP_BATCHES
        }
        assert min(state.speed.lookups.values()) > 0
        assert min(state.speed.inserts, state.speed.replacements, state.speed.pages_written) > 0
    assert [restart.slots for restart in large.restarts] == [5000, 20_000]
    assert large.restarts[1].table_bytes == 20_032 * 64
    document = json.loads(json.dumps(large.as_dict()))
    assert document["states"][0]["bytes_per_slot"] > 0
    text = "\n".join(lines(large))
    for word in ("LOOKUP present, 512", "evict and insert", "restart of 20000 slots"):
        assert word in text


def test_room_is_looked_at_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too little for"):
        check_room(tmp_path / "flash", 1 << 45)
    (tmp_path / "there").touch()
    with pytest.raises(UserError, match="exists"):
        check_room(tmp_path / "there", 1000)


def test_errors_are_for_people_and_what_was_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flash"
    path.write_bytes(b"x")
    assert main(["--slots", "1000", "--path", str(path), "--quick"]) == 2
    assert "measure_large:" in capsys.readouterr().err
    assert path.read_bytes() == b"x"
