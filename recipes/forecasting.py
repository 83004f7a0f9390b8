"""Forecasts of yes or no by the model's own probabilities, trained on the Brier score, held out by date.

    python -m recipes.forecasting                                    # rain after wet days, whose probability is known
    python -m recipes.forecasting dataset=mine.jsonl model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.forecasting dataset=mine.jsonl cutoff=2025-06-01 rule=cross_entropy

A line of the file is {"question": "...", "date": "2025-03-01", "outcome": true}. Questions from the cutoff on are held out, so
that training uses nothing from after a held-out question's date; without a cutoff, the last fifth of the dates. The
table at the end shows how often events with each forecast probability came true, and how much better the forecasts are than the
base rate of the training questions. forecasts.jsonl in the run's folder has each forecast.
"""

from pathlib import Path

import chz

from recipes.common import dataset_label, for_model, run_config
from recipes.decisions import DecisionKeys, show_changes
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.decisions import train
from tinker_cookbook.decisions.forecasts import (
    ForecastDatasetBuilder,
    ForecastRows,
    forecast_rows,
    reliability,
    verification,
)
from tinker_cookbook.decisions.policy import DecisionPolicy
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.report.tables import print_table
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.utils.files import write_json, write_jsonl
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "forecasting"
SHIPPED = "rain"


@chz.chz(typecheck=True)
class CLIConfig(ForecastRows, DecisionKeys, dataset=SHIPPED, rule="brier", num_epochs=1, batch_size=64, eval_every=20):
    """Keys of `python -m recipes.forecasting`."""


def make_builder(cli: CLIConfig) -> ForecastDatasetBuilder:
    """The questions of resolved keys."""
    return cli.fill(ForecastDatasetBuilder, common_config=chat_settings(cli))


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    folder = [cli.rule, dataset_label(cli.dataset, SHIPPED)]
    return run_config(cli, train.Config, train.check_config, RECIPE, folder, dataset_builder=make_builder(cli))


async def verify(cli: CLIConfig, log_path: str) -> tuple[dict[str, float], list[list[str]]]:
    """Forecast the held-out questions with the last weights of a run: `verification` and `reliability`; files are written."""
    record = get_last_checkpoint(log_path, "sampler_path")
    if record is None:
        raise CheckpointError(f"{log_path} has no weights to forecast with; delete the folder and start over")
    weights = cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=record.sampler_path)
    opened = await weights.open_policy("the forecaster")
    asked = DecisionPolicy(opened.sampling_client, opened.renderer)
    train_rows, test = make_builder(cli).sides()
    pending = [asked.probabilities(row.messages, row.decision.choices) for row in test]
    forecasts = [yes for yes, _ in await gather_all(pending)]
    scores = verification(forecasts, test, sum(row.outcome for row in train_rows) / len(train_rows))
    write_jsonl(Path(log_path) / "forecasts.jsonl", forecast_rows(forecasts, test))
    write_json(Path(log_path) / "verification.json", scores)
    return scores, reliability(forecasts, test)


async def main(cli: CLIConfig) -> RunSummary:
    cli = for_model(cli)
    config = build_config(cli)
    summary = await train.main(config)
    scores, table = await verify(cli, config.log_path)
    print_table("Held-out questions", ("forecast", "questions", "mean", "came true [95 %]"), table)
    print(
        f"Brier score {scores['brier']:.3f}, of the training questions' share of yes {scores['reference_brier']:.3f}: "
        f"skill {scores['skill']:.2f}, gain {scores['gain']:.3f} [{scores['gain_low']:.3f}, {scores['gain_high']:.3f}]"
    )
    show_changes(config.log_path)
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
