"""A figure of a metric: a curve per setting, seeds as a band.

    python -m recipes.plot log_path=RUN y=reward out=reward.svg
    python -m recipes.plot log_path=SWEEP x=progress/sampled_tokens y=test/correct out=correct.pdf
    python -m recipes.plot log_path=RUN,OTHER y=optim/entropy smoothing=0.8 out=entropy.png

Metrics may be named as on the terminal (reward, correct, kl) or as in metrics.jsonl. Needs matplotlib: the extra plot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import RunFolder
from tinker_cookbook.report.figures import curves, draw, metric_named
from tinker_cookbook.report.runs import listed_folders, open_runs
from tinker_cookbook.utils.fields import docs


@chz.chz(typecheck=True)
class CLIConfig(RunFolder):
    """Keys of `python -m recipes.plot`."""

    DOCS = docs(log_path="folder of a run, or of several runs; more than one, separated by commas")

    y: str = chz.field(doc="the metric")
    x: str = chz.field(
        default="step", doc="the x axis: step, progress/sampled_tokens, progress/seconds or another metric"
    )
    out: str = chz.field(doc="the file: .svg, .pdf or .png")
    smoothing: float = chz.field(
        default=0.0, doc="weight of the past, from 0 to below 1", validator=[chz.validators.ge(0), chz.validators.lt(1)]
    )
    band: Literal["interval", "range", "none"] = chz.field(
        default="interval", doc="around the mean of several seeds: its 95 % interval, their range, or nothing"
    )
    title: str | None = chz.field(default=None, doc="above the figure")
    width: float = chz.field(default=4.5, doc="inches", validator=chz.validators.gt(0))
    height: float = chz.field(default=3.0, doc="inches", validator=chz.validators.gt(0))


def main(cli: CLIConfig) -> None:
    paths = listed_folders(cli.log_path)
    runs = open_runs(paths)
    x, y = metric_named(cli.x, runs), metric_named(cli.y, runs)
    lines = curves(runs, x, y, cli.smoothing, cli.band)
    if not lines:
        raise ConfigurationError(f"no run has numbers of {y!r} over {x!r}")
    out = Path(cli.out).expanduser()
    draw(lines, x, y, out, cli.title, cli.width, cli.height)
    print(f"{out}: {y} over {x}; curves: {len(lines)}, runs: {len(runs)}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
