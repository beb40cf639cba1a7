"""What can be measured, and how options become it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from common.errors import UserError
from host_agent.bench.options import bench_options, bench_settings
from host_agent.bench.settings import BenchSettings


def _settings(*arguments: str) -> BenchSettings:
    made: list[BenchSettings] = []

    @click.command()
    @bench_options
    def command(out: Path, as_json: bool, **options: Any) -> None:
        made.append(bench_settings(options, flash_dir=out))
        assert options == {}

    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return made[0]


def test_options_change_what_they_name() -> None:
    words = "--block 64KiB --block 1MiB --batch 4 --lookup-batch 2 --case lookup --rounds 3 --blocks 8"
    words += " --no-verify --limit 0"
    settings = _settings(*words.split())
    assert (settings.block_bytes, settings.batches, settings.operations) == ((64 << 10, 1 << 20), (4,), ("lookup",))
    assert (settings.rounds, settings.blocks, settings.verify, settings.lookup_batches) == (3, 8, False, (2,))
    assert settings.limit_s == 0
    assert _settings("--blocks", "20").batches == (1, 16), "only batches that a round has"
    assert _settings() == BenchSettings(flash_dir=Path("bench-report"))


@pytest.mark.parametrize(
    "values",
    [
        {"block_bytes": ()},
        {"block_bytes": (4097,)},
        {"batches": (0,)},
        {"batches": (129,)},
        {"rounds": 0},
        {"operations": ("store",)},
        {"operations": ()},
        {"mixed_block_bytes": 1},
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        BenchSettings(**values)


def test_short_rounds_have_several_passes() -> None:
    settings = BenchSettings()
    assert settings.passes(64 << 10, 128) == 8
    assert settings.passes(256 << 10, 128) == 2, "as far as 64 MiB go"
    assert settings.passes(64 << 10, 16) == 1
    assert settings.passes(4 << 20, 128) == 1
