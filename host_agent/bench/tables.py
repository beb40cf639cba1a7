"""Tables of a report: one model, shown on a terminal or as Markdown. Knows nothing of what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

_WIDE_COLUMNS: Final = 140
"""A terminal at least so wide shows the columns of detail, and cells in full."""

_WORDS_WIDTH_MIN: Final = 7


@dataclass(frozen=True)
class Column:
    """`detail`: left out where there is little room. `words`: text, aligned to the left."""

    heading: str
    detail: bool = False
    words: bool = False


@dataclass
class Table:
    """Rows have a short and a full text for every column. `notes` stand below."""

    title: str
    columns: Sequence[Column]
    rows: list[list[tuple[str, str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str | tuple[str, str]) -> None:
        """A pair is the short form, for narrow terminals, and the full one.

        Raises ValueError for another number of cells than there are columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns of {self.title!r}")
        self.rows.append([cell if isinstance(cell, tuple) else (cell, cell) for cell in cells])

    def markdown(self, level: int = 2) -> str:
        """With its title as a heading of `level`. Ends with a newline."""
        lines = [f"{'#' * level} {self.title}", "", _line([column.heading for column in self.columns])]
        lines.append(_line(["---" if column.words else "---:" for column in self.columns]))
        lines += [_line([full for _, full in row]) for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"

    def print(self, console: Console) -> None:
        """Without the columns of detail on a narrow terminal."""
        wide = console.width >= _WIDE_COLUMNS
        shown = [at for at, column in enumerate(self.columns) if wide or not column.detail]
        table = RichTable(title=Text(self.title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for at in shown:
            column = self.columns[at]
            if column.words:
                table.add_column(Text(column.heading), overflow="fold", min_width=_WORDS_WIDTH_MIN)
            else:
                table.add_column(Text(column.heading), justify="right", no_wrap=not _many_words(column.heading))
        for row in self.rows:
            table.add_row(*(Text(row[at][wide]) for at in shown))
        console.print(table)
        for note in self.notes:
            console.print(Text(note))


def _many_words(heading: str) -> bool:
    return " " in heading


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
