"""The head of every report: what it must say, and that committed reports say it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from host_agent.bench.environment import (
    NO_COMMIT,
    REQUIRED,
    commit_text,
    file_system_text,
    missing,
    read_environment,
    rows,
)

REPORTS = Path(__file__).resolve().parents[4] / "docs" / "reports"


def test_it_names_machine_commit_and_command() -> None:
    environment = read_environment(["/somewhere/entresol-emu", "bench", "--out", "a b"])
    assert environment.command == "entresol-emu bench --out 'a b'"
    assert missing({"environment": environment.as_dict()}) == []
    assert "x86_64" in environment.machine or "aarch64" in environment.machine
    assert set(environment.versions) >= {"python", "numpy"}
    assert dict(rows(environment.as_dict()))["command"] == environment.command


def test_what_a_report_lacks_is_named() -> None:
    assert missing({}) == list(REQUIRED)
    assert missing({"environment": {**dict.fromkeys(REQUIRED, "x"), "commit": " ", "date": 3}}) == ["commit", "date"]


def test_the_commit_is_that_of_the_directory_and_says_when_files_differ(tmp_path: Path) -> None:
    assert commit_text(tmp_path) == NO_COMMIT

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert commit_text(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit_text(tmp_path).endswith("-dirty")


def test_the_file_system_of_a_path() -> None:
    assert file_system_text(Path("/proc/self")).startswith("proc on ")
    assert file_system_text(Path("/nowhere/at/all")) == ""


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_committed_report_says_what_it_was_measured_on(path: Path) -> None:
    assert missing(json.loads(path.read_text(encoding="utf-8"))) == []
