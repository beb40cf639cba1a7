"""A report on disk: its JSON and, beside it, the same for people. Every benchmark's report is written here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common.errors import UserError
from host_agent.bench import environment

STEM: Final = "report"


def head(title: str, read: Mapping[str, Any], further: Sequence[str] = ()) -> str:
    """Markdown: the title, what `environment` says, and `further` items of that list. Ends with a newline."""
    items = [f"{name}: {value}" for name, value in environment.rows(read)]
    return "\n".join([f"# {title}", "", *(f"- {item}" for item in (*items, *further))]) + "\n"


def make_directory(directory: Path) -> None:
    """Raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error


def write_files(directory: Path, document: Mapping[str, Any], text: str, stem: str = STEM) -> list[Path]:
    """STEM.md and STEM.json in `directory`, which is made where there is none. The files written. Raises UserError."""
    make_directory(directory)
    files = {directory / f"{stem}.md": text, directory / f"{stem}.json": json.dumps(document, indent=1) + "\n"}
    try:
        for path, content in files.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from error
    return list(files)


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(f"{directory}: the report cannot be written: {error.strerror}")
