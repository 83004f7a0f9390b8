"""The results of runs on one page: outcome, ranking, curves, every rollout token by token, debates, and a chat with a checkpoint.

    python -m recipes.report log_path=RUN                    # writes RUN/report.html, a self-contained page
    python -m recipes.report log_path=RUN,OTHER_RUN          # both in one page
    python -m recipes.report log_path=SWEEP out=sweep.html   # all runs below a folder
    python -m recipes.report log_path=RUN serve=true         # the same page and a chat with a checkpoint, of a live run too
    python -m recipes.report log_path=RUN out=run.eval       # its rollouts as a log of inspect-ai (the extra inspect)
    python -m recipes.report log_path=RUN out=run.jsonl      # its rollouts as OpenTelemetry spans, OTLP in JSON (the extra otel)

The file contains the tokens of all rollouts, up to 60 MB, and lists omitted ones; serve=true shows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import chz
from rich.console import Console

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import RunFolder
from tinker_cookbook.report import failures
from tinker_cookbook.report.export import INSPECT_SUFFIX, SPANS_SUFFIX, chosen_steps, write_inspect_log, write_spans
from tinker_cookbook.report.page import write_page
from tinker_cookbook.report.rollouts import index_run, words_of
from tinker_cookbook.report.runs import RunData, listed_folders, open_runs
from tinker_cookbook.report.serve import serve
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.utils.files import write_bytes

BASE_NAME = "report.html"
EXPORTS = {INSPECT_SUFFIX: write_inspect_log, SPANS_SUFFIX: write_spans}
SUFFIXES = (".html", *EXPORTS)


@chz.chz(typecheck=True)
class CLIConfig(RunFolder):
    """Keys of `python -m recipes.report`."""

    DOCS = docs(log_path="folder of a run, or of several runs; more than one, separated by commas")

    out: str | None = chz.field(
        default=None,
        doc="the file to write: .html, .eval (inspect-ai) or .jsonl (spans); None: report.html in the first folder",
    )
    steps: str | None = chz.field(
        default=None, doc="with out=....eval or .jsonl: the steps, such as 7 or 0-9; None: all"
    )
    title: str | None = chz.field(default=None, doc="title of the page; None: the name of the first folder")
    failures: int = chz.field(
        default=failures.WORST,
        doc="how many of the worst rollouts, of those that monitors flag, and of the groups that were given up are listed here, "
        "with their reasons; 0: none",
        validator=chz.validators.ge(0),
    )
    serve: bool = chz.field(default=False, doc="serve the page on this machine instead, until Ctrl-C")
    port: int = chz.field(
        default=8420,
        doc="with serve=true: the port; 0: any free one",
        validator=[chz.validators.ge(0), chz.validators.lt(65536)],
    )


def main(cli: CLIConfig) -> None:
    paths = listed_folders(cli.log_path)
    if cli.serve and cli.out is not None:
        raise ConfigurationError("out and serve=true are given: give one of them")
    suffix = Path(cli.out).suffix if cli.out is not None else SUFFIXES[0]
    if suffix not in SUFFIXES:
        raise ConfigurationError(f"out={cli.out!r}: must end in {', '.join(SUFFIXES)}")
    if cli.steps is not None and suffix == SUFFIXES[0]:
        raise ConfigurationError("steps is for out=....eval and out=....jsonl; the page has all steps")
    console = Console(stderr=True)
    first = Path(paths[0]).expanduser()
    title = cli.title or first.resolve().name
    if cli.serve:
        serve(paths, title, cli.port, lambda url: print(f"{url}  (Ctrl-C ends it)", flush=True))
        return
    runs = open_runs(paths)
    if cli.out is not None and suffix in EXPORTS:
        export_rollouts(runs, Path(cli.out).expanduser(), cli.steps, console)
        return
    with console.status("reading") as status:
        content = write_page(runs, title, status.update)
    for run in runs if cli.failures else []:
        if run.steps():
            failures.show(index_run(run, words_of(run)), run.label, cli.failures)
    path = Path(cli.out).expanduser() if cli.out is not None else first / BASE_NAME
    write_bytes(path, content)
    print(f"{path}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {len(content) / 1e6:.1f} MB")


def export_rollouts(runs: Sequence[RunData], path: Path, steps: str | None, console: Console) -> None:
    """The rollouts of the one run, in the format of the file's ending."""
    if len(runs) != 1:
        raise ConfigurationError(
            f"out={str(path)!r}: takes the rollouts of one run, not of {len(runs)}; give its folder"
        )
    with console.status("reading") as status:
        count = EXPORTS[path.suffix](runs[0], path, chosen_steps(runs[0], steps), status.update)
    print(f"{path}: {count} rollouts, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
