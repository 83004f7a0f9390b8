"""Rewrites the results section of benchmarks/README.md from the JSON files in benchmarks/results.

python -m benchmarks.tables

Where a folder benchmarks/results/earlier/DATE has a file of the same name, a first part compares the two. Move a result there
before measuring it again.
"""

import json
from pathlib import Path

import chz

from benchmarks.config import RESULTS, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.history import compare_with_earlier
from benchmarks.report import Report, markdown, table_lines, write_atomically

BEGIN, END = "<!-- results: written by `python -m benchmarks.tables` -->", "<!-- end of results -->"
NO_RESULTS = "Nothing measured yet.\n"
EARLIER = (
    "Medians of runs on different days, on machines of the same kind. The engine changed between them and the machine may have:\n"
    "the other tools' own figures tell how much."
)


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.tables`."""

    results: str = chz.field(default=RESULTS, doc="folder with the JSON files")
    readme: str = chz.field(
        default=str(Path(__file__).with_name("README.md")), doc="markdown file with the two marker lines"
    )


def render(results: Path) -> str:
    """What changed since the earlier results, then all reports of the folder, as markdown in order of their names."""
    reports = _read(results)
    parts = [markdown(report, heading="###") for report in reports.values()]
    return "\n".join([*_beside_earlier(results, reports), *parts]) or NO_RESULTS


def _read(folder: Path) -> dict[str, Report]:
    """The folder's reports by file name. Other commands keep files there that are not reports."""
    paths = [path for path in sorted(folder.glob("*.json")) if "tables" in json.loads(path.read_text())]
    return {path.name: Report.read(path) for path in paths}


def _beside_earlier(results: Path, reports: dict[str, Report]) -> list[str]:
    days = [_read(folder) for folder in sorted(results.glob("earlier/*/"))]
    sections = [
        "\n".join([f"**{report.benchmark}, {report.shape}: {table.title}**", "", *table_lines(table)])
        for name, report in reports.items()
        for table in compare_with_earlier([day[name] for day in days if name in day], report)
    ]
    return [f"### Beside earlier results\n\n{EARLIER}\n", *sections] if sections else []


def replace_section(text: str, section: str) -> str:
    """The text with the part between the marker lines replaced. Raises BenchmarkError unless each is there exactly once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchmarkError(f"readme: it must have the lines {BEGIN!r} and {END!r} once each, in this order")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def main(config: Config) -> None:
    readme = Path(config.readme)
    write_atomically(readme, replace_section(readme.read_text(), render(Path(config.results))))
    print(f"wrote {readme}")


if __name__ == "__main__":
    run_benchmark(main)
