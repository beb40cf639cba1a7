"""The command line without a DPU: what it says when it cannot, and its exit codes. With one: tests/system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpu_app.cli import main

EXAMPLE = Path(__file__).parents[3] / "configs/dpu.yaml"


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments, env={"ENTRESOL_DPU_ADDRESS": None, **environment})
    return result.exit_code, result.stdout, result.stderr


def test_config_check_says_that_a_sound_file_is_sound() -> None:
    code, out, _ = run("config-check", str(EXAMPLE))
    assert (code, "sound" in out) == (0, True)
    code, out, _ = run("config-check", str(EXAMPLE), "--json")
    assert (code, json.loads(out)["session_ttl"]) == (0, "6s")


def test_config_check_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(EXAMPLE.read_text().replace("capacity: 1GiB", "capcity: 1GiB"))
    line = 1 + file.read_text().splitlines().index("    capcity: 1GiB")
    code, out, err = run("config-check", str(file))
    assert (code, out) == (2, "")
    assert err == f"entresol-dpu: {file}:{line}: regions[0].capcity: unknown key; did you mean 'capacity'?\n"


def test_run_refuses_a_bad_file_with_the_same_words(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: x\n")
    code, _, err = run("run", "--config", str(file))
    assert code == 2
    assert f"{file}:1: state_dir: is missing" in err


@pytest.mark.parametrize("command", [("config-check",), ("run", "--config")])
def test_a_backend_that_is_not_installed_is_told_before_anything_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "dpu.yaml"
    for change, words in (
        (("name: emu-shm", "name: emu-nix"), "fabric.name: no fabric backend 'emu-nix' is installed; there are: "),
        (("slot: 2MiB", "slot: 2MiB\n    flash: {driver: nix}"), "regions[0].flash.driver: no flash backend 'nix'"),
    ):
        file.write_text(EXAMPLE.read_text().replace(*change))
        code, out, err = run(*command, str(file))
        assert (code, out) == (2, "")
        assert words in err


@pytest.mark.parametrize(
    "command", [("status",), ("pauses",), ("drain",), ("regions", "list"), ("regions", "delete", "r", "--yes")]
)
def test_commands_say_when_no_dpu_is_named_or_none_is_there(command: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = run(*command)
    assert (code, "which DPU?" in err) == (2, True)
    code, _, err = run(*command, "--state-dir", str(tmp_path))
    assert (code, "no DPU application runs" in err) == (3, True)
    code, _, err = run(*command, "--address", f"unix:{tmp_path}/none", "--timeout", "5s")
    assert (code, "UNAVAILABLE" in err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "--for", "5"), "has no unit"),
        (("regions", "create", "r", "--path", "/x", "--slot", "5Kb", "--window", "1MiB"), "no known unit of a size"),
        (
            ("regions", "create", "r", "--path", "/x", "--slot", "4KiB", "--window", "1MiB", "--set", "lru"),
            "write KEY=VALUE",
        ),
        (("regions", "format", "r", "--uuid", "xyz"), "is no uuid"),
    ],
)
def test_bad_options_are_refused_before_anything_is_asked(arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*arguments, "--address" if len(arguments) > 1 else "", "unix:/nonexistent")
    assert code == 2
    assert words in err


def test_version_is_that_of_the_distribution() -> None:
    code, out, _ = run("version")
    assert code == 0
    assert out.count(".") == 2
    assert run("--version") == (0, out, "")
