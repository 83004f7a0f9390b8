"""Small tables, in the terminal and on pages."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as a table of Markdown, without a line break at the end."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text as a table; the first column is not wrapped."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=True).print(table)
