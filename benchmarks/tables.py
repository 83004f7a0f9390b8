"""Writes the results section of benchmarks/README.md anew from the JSON files in benchmarks/results.

python -m benchmarks.tables
"""

import json
from pathlib import Path

import chz

from benchmarks.config import RESULTS, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.report import Report, markdown, write_atomically

BEGIN, END = "<!-- results: written by `python -m benchmarks.tables` -->", "<!-- end of results -->"
NO_RESULTS = "Nothing measured yet.\n"


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.tables`."""

    results: str = chz.field(default=RESULTS, doc="folder with the JSON files")
    readme: str = chz.field(
        default=str(Path(__file__).with_name("README.md")), doc="markdown file with the two marker lines"
    )


def render(results: Path) -> str:
    """All reports of the folder as markdown, in order of their names. Other commands keep files there that are no reports."""
    paths = [path for path in sorted(results.glob("*.json")) if "tables" in json.loads(path.read_text())]
    reports = [Report.read(path) for path in paths]
    return "\n".join(markdown(report, heading="###") for report in reports) or NO_RESULTS


def replace_section(text: str, section: str) -> str:
    """The text with the part between the marker lines replaced. Raises BenchmarkError when they are not there, once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchmarkError(f"readme: it must hold the lines {BEGIN!r} and {END!r} once each, in this order")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def main(config: Config) -> None:
    readme = Path(config.readme)
    write_atomically(readme, replace_section(readme.read_text(), render(Path(config.results))))
    print(f"wrote {readme}")


if __name__ == "__main__":
    run_benchmark(main)
