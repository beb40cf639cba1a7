"""The report of a comparison: ratios, spread, who failed; and huge pages for the time of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from emulator.peers import everyone, hugepages, report
from emulator.peers.catalogue import ENTRESOL_SHM, LOOKUP, RETRIEVE
from emulator.peers.run import Cell, Outcome, Peers, PeersSettings
from host_agent.bench.tables import Table

MIB = 1 << 20
PLACE = (RETRIEVE, MIB, 16)


@pytest.fixture
def run(tmp_path: Path) -> Peers:
    return Peers(everyone.choose([]), PeersSettings(tmp_path, tmp_path), lambda _text: None)


def outcome(run: Peers, name: str) -> Outcome:
    return next(outcome for outcome in run.outcomes if outcome.peer.name == name)


def cell(*gb_per_s: float) -> Cell:
    moved = 10**9
    return Cell(gb_per_s=[*gb_per_s], calls_us=[1.0, 2.0, 9.0], client_cpu_s=0.5, server_cpu_s=2.0, moved_bytes=moved)


def made(run: Peers) -> dict[str, Any]:
    return report.as_dict(run, {"machine": "here", "versions": {}}, {"rounds": 3})


def table(found: dict[str, Any], title: str) -> Table:
    return next(table for table in report.tables(found) if table.title.startswith(title))


def full(table: Table) -> list[tuple[str, ...]]:
    """The rows as a wide terminal and Markdown show them."""
    return [tuple(text for _, text in row) for row in table.rows]


def test_a_ratio_is_round_by_round_and_against_the_fabric_of_the_same_reach(run: Peers) -> None:
    outcome(run, ENTRESOL_SHM).cells[PLACE] = cell(6.0, 100.0, 5.0)
    outcome(run, "Redis, raw pipeline, Unix socket").cells[PLACE] = cell(2.0, 3.0, 4.0)
    outcome(run, "Redis, raw pipeline, TCP").cells[PLACE] = cell(2.0, 3.0, 4.0)  # no Entresol over TCP was measured
    found = made(run)
    assert full(table(found, "RETRIEVE staged: Entresol / peer")) == [
        ("Redis, raw pipeline, Unix socket", ENTRESOL_SHM, "3.00 (1.25-33.33)")
    ]
    assert ("Redis, raw pipeline, TCP", "3.00 (2.00-4.00)") in full(table(found, "RETRIEVE staged, GB/s"))
    assert (ENTRESOL_SHM, "0.50 + 2.00") in full(table(found, "RETRIEVE staged, processor"))


def test_where_rounds_do_not_pair_a_ratio_is_of_medians(run: Peers) -> None:
    outcome(run, ENTRESOL_SHM).cells[PLACE] = cell(6.0, 100.0, 5.0)
    outcome(run, "Redis, raw pipeline, Unix socket").cells[PLACE] = cell(2.0, 4.0)  # timed out in its third round
    (row,) = full(table(made(run), "RETRIEVE staged: Entresol / peer"))
    assert row[-1] == "2.00"


def test_limits_stand_beside_the_fabric_that_they_limit(run: Peers) -> None:
    outcome(run, ENTRESOL_SHM).cells[PLACE] = cell(6.0)
    run.limits.readings["memmove, 4 KiB pages", RETRIEVE, MIB, 16] = [12.0]
    run.limits.readings["memmove, huge pages", RETRIEVE, MIB, 16] = [13.0]
    run.limits.readings["bare TCP socket", RETRIEVE, MIB, 16] = [3.0]
    rows = full(table(made(run), "RETRIEVE staged: Entresol / peer"))
    assert rows == [("memmove, 4 KiB pages", ENTRESOL_SHM, "0.50 (0.50-0.50)")]


def test_lookups_are_compared_by_keys_a_second(run: Peers) -> None:
    place = (LOOKUP, 4096, 512)
    outcome(run, ENTRESOL_SHM).cells[place] = Cell(keys_per_s=[3e6], calls_us=[170.0], looked_up=10**6)
    redis = outcome(run, "Redis, raw pipeline, Unix socket")
    redis.cells[place] = Cell(keys_per_s=[2e6], calls_us=[250.0], looked_up=10**6)
    lookup = full(table(made(run), "LOOKUP of 512 keys a call"))
    assert lookup[1][:4] == (redis.peer.name, ENTRESOL_SHM, "1.50 (1.50-1.50)", "2.000")


def test_blocks_that_were_refused_are_said(run: Peers) -> None:
    ours = outcome(run, ENTRESOL_SHM)
    ours.cells[PLACE] = cell(6.0)
    ours.cells[PLACE].failed = 3
    assert table(made(run), "RETRIEVE staged, GB/s").notes == [
        f"{ENTRESOL_SHM}, 1MiB x 16: 3 blocks were refused or missed"
    ]


def test_every_peer_is_named_with_its_version_settings_and_error(run: Peers) -> None:
    broken = outcome(run, "Redis, redis-py, TCP")
    broken.error = "posix_spawn failed: No such file or directory (redis-server)\nand more"
    who = full(table(made(run), "Who took part"))
    assert [row[0] for row in who] == [peer.name for peer in everyone.PEERS]
    row = next(row for row in who if row[0] == broken.peer.name)
    assert row[-1] == "posix_spawn failed: No such file or directory (redis-server)"
    assert all(row[2] for row in who)


def test_wrong_bytes_are_told_with_the_peer(run: Peers) -> None:
    outcome(run, ENTRESOL_SHM).wrong.append("retrieve of 1MiB: 2 blocks differ")
    assert report.wrong(made(run)) == [f"{ENTRESOL_SHM}: retrieve of 1MiB: 2 blocks differ"]


def test_only_names_families() -> None:
    names = {peer.family.name for peer in everyone.choose(["redis"])}
    assert names == {"entresol", "redis"}
    with pytest.raises(UserError, match="no peer 'reddis'; there are nixl"):
        everyone.choose(["reddis"])


def test_huge_pages_are_given_back(tmp_path: Path) -> None:
    pool = tmp_path / "nr_hugepages"
    pool.write_text("7\n")
    with hugepages.reserved(20, pool):
        assert pool.read_text() == "20"
    assert pool.read_text() == "7"
    with hugepages.reserved(5, pool):
        assert pool.read_text() == "7"


def test_huge_pages_that_cannot_be_set_are_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--huge-pages"), hugepages.reserved(1, tmp_path / "absent"):
        pass
