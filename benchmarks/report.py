"""Results as a table on the terminal, as JSON with every repetition, and as markdown."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.config import CommonConfig
from benchmarks.harness import Measurement, Spread, paired_ratio
from benchmarks.machine import facts

NOT_MEASURED = "not measured"
TOKENS_MAY_DIFFER = 0.25
"""Sampled lengths are random; a row that differs from the first by more than this share did not do the same work."""

_FILE_WIDTH = 180
"""characters per line when the table is printed to a file or a pipe"""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass
class Report:
    """One run of one benchmark. `measurements` is what the tables were computed from, for other statistics."""

    benchmark: str
    shape: str
    dtype: str
    device: str
    facts: dict[str, str]
    tables: list[Table]
    measurements: dict[str, object] = field(default_factory=dict)

    @classmethod
    def start(cls, benchmark: str, config: CommonConfig) -> Report:
        """An empty report with the machine's facts as they are now."""
        return cls(benchmark, config.shape, config.dtype, config.device, facts(config.threads), [])

    @classmethod
    def of_recipes(cls, benchmark: str) -> Report:
        """An empty report of a benchmark that runs recipes, on the shipped model in float32 on the CPU."""
        return cls(benchmark, "tiny_chat", "float32", "cpu", facts(int(os.environ.get("OMP_NUM_THREADS", "1"))), [])

    @property
    def name(self) -> str:
        return f"{self.benchmark}_{self.shape}_{self.dtype}_{self.device}"

    def add_comparison(self, title: str, results: Sequence[Measurement], per_token: bool) -> None:
        """A table of contenders with ours over each, and its repetitions."""
        self.tables.append(comparison_table(title, results, per_token))
        self.measurements[title] = [result.to_json() for result in results]

    def write(self, folder: str) -> list[Path]:
        """Write NAME.json and NAME.md, each whole or not at all."""
        root = Path(folder).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        files = {
            root / f"{self.name}.json": json.dumps(asdict(self), indent=1) + "\n",
            root / f"{self.name}.md": markdown(self),
        }
        for path, text in files.items():
            write_atomically(path, text)
        return list(files)

    @classmethod
    def read(cls, path: Path) -> Report:
        value = json.loads(path.read_text())
        return cls(**{**value, "tables": [Table(**table) for table in value["tables"]]})


def finish(report: Report, folder: str) -> None:
    """Print the report and write its files."""
    show(report)
    for path in report.write(folder):
        print(f"wrote {path}")


def comparison_table(title: str, results: Sequence[Measurement], per_token: bool) -> Table:
    """One row per contender, one ratio column per contender of ours. `per_token`: speeds are tokens per second."""
    ours = [r for r in results if r.is_ours and r.repetitions]
    columns = [
        "contender",
        "tokens",
        "seconds",
        *(["tokens/s"] if per_token else []),
        *(f"{o.name} / it" for o in ours),
    ]
    columns += ["disturbed"]
    rows = []
    for result in results:
        if result.status != "measured":
            rows.append([result.name, result.status, *[""] * (len(columns) - 2)])
            continue
        row = [result.name, _tokens(result, results), _spread(result.seconds)]
        row += [_spread(result.tokens_per_second)] if per_token else []
        row += ["" if o is result else _spread(paired_ratio(o, result, per_token), "x") for o in ours]
        row += [f"{result.disturbed} of {len(result.repetitions)}, {len(result.discarded)} redone"]
        rows.append(row)
    return Table(title, columns, rows)


def _tokens(result: Measurement, results: Sequence[Measurement]) -> str:
    reference = next(r for r in results if r.repetitions).tokens.median
    count = result.tokens.median
    differs = abs(count - reference) > TOKENS_MAY_DIFFER * reference
    return f"{count:,.0f}" + (" (not the same work)" if differs else "")


def _spread(spread: Spread, unit: str = "") -> str:
    return f"{number(spread.median)}{unit} ({number(spread.low)} to {number(spread.high)})"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def show(report: Report) -> None:
    """Print the facts and the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(f"[bold]{report.name}[/bold]")
    for table in report.tables:
        console.print(f"\n{table.title}", markup=False, highlight=False)
        rich = RichTable(box=box.SIMPLE)
        for i, column in enumerate(table.columns):
            rich.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for row in table.rows:
            rich.add_row(*row)
        console.print(rich)
    for key, value in report.facts.items():
        console.print(f"{key}: {value}", markup=False, highlight=False)


def markdown(report: Report, heading: str = "#") -> str:
    """The report as a markdown section."""
    lines = [f"{heading} {report.benchmark}: {report.shape}, {report.dtype}, {report.device}", ""]
    for table in report.tables:
        lines += [f"**{table.title}**", "", *table_lines(table)]
    lines.append("; ".join(f"{key} {value}" for key, value in report.facts.items()) + ".")
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """The table in markdown without its title, and an empty line."""
    rule = "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|"
    return [_line(table.columns), rule, *map(_line, table.rows), ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by one with this text; a reader sees the old text or the new."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
