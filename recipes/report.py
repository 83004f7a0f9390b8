"""What runs did, as one page: curves, rollouts token by token, debates, timing, health, and runs beside each other.

    python -m recipes.report log_path=RUN                    # writes RUN/report.html, which needs nothing else to be looked at
    python -m recipes.report log_path=RUN,OTHER_RUN          # both in one page
    python -m recipes.report log_path=SWEEP out=sweep.html   # all runs below a folder
    python -m recipes.report log_path=RUN serve=true         # the same page with all rollouts, also while the run goes on

The file holds the tokens of the groups that the runs have logged (num_groups_to_log); serve=true shows those of all.
"""

from __future__ import annotations

from pathlib import Path

import chz
from rich.console import Console

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.report.page import write_page
from tinker_cookbook.report.runs import open_runs
from tinker_cookbook.report.serve import serve
from tinker_cookbook.utils.files import write_bytes

BASE_NAME = "report.html"


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m recipes.report`."""

    log_path: str = chz.field(doc="folder of a run, or of several runs; more than one, divided by commas")
    out: str | None = chz.field(default=None, doc="the file to write; None: report.html in the first folder")
    title: str | None = chz.field(default=None, doc="of the page; None: the name of the first folder")
    serve: bool = chz.field(default=False, doc="serve the page on this machine instead, until Ctrl-C")
    port: int = chz.field(
        default=8420,
        doc="with serve=true: where; 0 takes a free one",
        validator=[chz.validators.ge(0), chz.validators.lt(65536)],
    )


def main(cli: CLIConfig) -> None:
    paths = [path for path in cli.log_path.split(",") if path]
    if not paths:
        raise ConfigurationError("log_path: give at least one folder")
    if cli.serve and cli.out is not None:
        raise ConfigurationError("out and serve=true are given: give one of them")
    console = Console(stderr=True)
    first = Path(paths[0]).expanduser()
    title = cli.title or first.resolve().name
    if cli.serve:
        serve(paths, title, cli.port, lambda url: print(f"{url}  (Ctrl-C ends it)", flush=True))
        return
    runs = open_runs(paths)
    with console.status("reading") as status:
        content = write_page(runs, title, status.update)
    path = Path(cli.out).expanduser() if cli.out is not None else first / BASE_NAME
    write_bytes(path, content)
    print(f"{path}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
