"""One table, as Markdown and on terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from host_agent.bench.tables import Column, Table


def _table() -> Table:
    table = Table("Figures", (Column("what", words=True), Column("GB/s"), Column("range", detail=True)))
    table.add("a|b", "1.5", "1-2")
    table.notes.append("of one run")
    return table


def test_as_markdown() -> None:
    assert _table().markdown() == (
        "## Figures\n\n| what | GB/s | range |\n| --- | ---: | ---: |\n| a\\|b | 1.5 | 1-2 |\n\nof one run\n"
    )


@pytest.mark.parametrize(("width", "shown"), [(80, False), (160, True)])
def test_detail_is_for_wide_terminals(width: int, shown: bool) -> None:
    text = io.StringIO()
    _table().print(Console(file=text, width=width))
    assert ("1-2" in text.getvalue()) is shown
    assert "of one run" in text.getvalue()


def test_a_row_fits_its_columns() -> None:
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        _table().add("a", "b")
