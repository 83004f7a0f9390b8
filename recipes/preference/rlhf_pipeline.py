"""Reinforcement learning from human feedback in its three classical stages, each in a separate folder:

    sft/                supervised warm start on the replies of the comparisons
    preference_model/   the warm model learns to say which of two replies is better
    rl/                 the warm model's replies are compared by the preference model, and winners are reinforced

A finished stage is not run again, so an interrupted pipeline resumes where it stopped:

    python -m recipes.preference.rlhf_pipeline
    python -m recipes.preference.rlhf_pipeline dataset=my_comparisons.jsonl model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.preference.rlhf_pipeline log_path=runs/rlhf behavior_if_log_dir_exists=resume
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz

from recipes.common import (
    RL_RATES,
    SL_LEARNING_RATE,
    GroupKeys,
    R,
    RateKey,
    Rates,
    ReplyLength,
    dataset_label,
    for_model,
    open_log_path,
)
from recipes.preference.data import SHIPPED, ComparisonConfig, comparison_source
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.field_groups import Epochs
from tinker_cookbook.preference.comparison_policy_evaluator import ComparisonEvaluator, LabelAccuracyEvaluator
from tinker_cookbook.preference.envs import PairwisePreferenceRLDatasetBuilder
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonRow,
    FromComparisons,
)
from tinker_cookbook.preference.types import PreferenceModelBuilderFromChatRenderer
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.config import RLOptions
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.metadata import write_run_metadata
from tinker_cookbook.runs.outcome import RunSummary, print_changes, summarize
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.supervised import train as sl_train
from tinker_cookbook.supervised.data import SupervisedDatasetFromList, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.fields import REQUIRED, FieldGroup, docs

RECIPE = "rlhf_pipeline"
SFT, PREFERENCE_MODEL, RL = "sft", "preference_model", "rl"
SFT_RATES, PREFERENCE_RATES = Rates(1e-2, SL_LEARNING_RATE), Rates(2e-3, SL_LEARNING_RATE)
"""There is little shipped data, and the tiny model has to learn a new style and a new task from it."""


@chz.chz(typecheck=True)
class Stage(Epochs, RateKey, num_epochs=3):
    """A supervised stage."""

    DOCS = docs(
        learning_rate=(
            f"default: {SL_LEARNING_RATE:g}; for tiny models {SFT_RATES.tiny:g} (sft) and "
            f"{PREFERENCE_RATES.tiny:g} (preference)"
        )
    )


@chz.chz(typecheck=True)
class Demonstrations(FieldGroup):
    """The replies that the warm start learns."""

    demonstrations: Literal["both", "chosen"] = chz.field(
        default="both", doc="the replies that the warm start imitates: both of a comparison, or the chosen one"
    )


@chz.chz(typecheck=True)
class CLIConfig(
    Demonstrations, ComparisonConfig, ReplyLength, GroupKeys, RLOptions, rates=RL_RATES, group_size=4, eval_every=10
):
    """Keys of `python -m recipes.preference.rlhf_pipeline`. No stage takes more than max_steps steps; learning_rate is
    that of the last one.
    """

    sft: Stage = chz.field(default_factory=Stage, doc="the warm start")
    preference: Stage = chz.field(default_factory=Stage, doc="the preference model")
    rl_steps: int = chz.field(default=10, doc="steps of the last stage", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class DemonstrationsBuilder(Demonstrations, FromComparisons, ChatDatasetBuilder, demonstrations=REQUIRED):
    """The replies of comparisons as conversations to imitate."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = self.comparison_builder.get_rows()
        return self._dataset(train), self._dataset(test) if test else None

    def _dataset(self, rows: list[ComparisonRow]) -> SupervisedDataset:
        conversations = [conversation for row in rows for conversation in self._conversations(row)]
        to_datum = partial(
            conversation_to_datum,
            renderer=self.renderer,
            max_length=self.common_config.max_length,
            train_on_what=TrainOnWhat.LAST_ASSISTANT_TURN,
        )
        return SupervisedDatasetFromList(conversations, self.common_config.batch_size, to_datum)

    def _conversations(self, row: ComparisonRow) -> list[list[Message]]:
        comparison, chosen = row.labeled.comparison, row.labeled.chosen
        both = [comparison.completion_A, comparison.completion_B]
        replies = both if self.demonstrations == "both" or chosen is None else [chosen]
        return [[*comparison.prompt_conversation, *reply] for reply in replies]


def label_accuracy(data: ChatDatasetBuilderFromComparisons) -> LabelAccuracyEvaluator:
    """Evaluates the preference model in training on the held-out comparisons."""
    _, test = data.comparison_builder.get_labeled_comparisons()
    return LabelAccuracyEvaluator(test or [], data.renderer)


def win_rate(data: PairwisePreferenceRLDatasetBuilder, max_tokens: int, seed: int) -> ComparisonEvaluator:
    """Lets the policy compete with the replies A of the held-out comparisons; the preference model judges."""
    _, test = data.comparison_builder.get_labeled_comparisons()
    return ComparisonEvaluator(
        data.preference_model_builder,
        [one.comparison for one in test or []],
        data.policy_renderer_name,
        data.policy_model_name,
        max_tokens=max_tokens,
        seed=seed,
        name="test",
    )


def stage_config(
    cli: CLIConfig, config_cls: type[R], log_path: Path, stage: str, start: str | None, **overrides: Any
) -> R:
    """The config of a stage from resolved keys and `overrides`. `start`: the weights to start from."""
    return cli.fill(
        config_cls,
        log_path=str(log_path / stage),
        recipe_name=f"{RECIPE}/{stage}",
        load_checkpoint_path=start,
        wandb_name=cli.wandb_name and f"{cli.wandb_name}-{stage}",
        **overrides,
    )


def sft_config(cli: CLIConfig, log_path: Path) -> sl_train.Config:
    """Stage 1."""
    cli = for_model(cli)
    data = cli.fill(DemonstrationsBuilder, common_config=chat_settings(cli), comparison_builder=comparison_source(cli))
    return stage_config(
        cli,
        sl_train.Config,
        log_path,
        SFT,
        cli.load_checkpoint_path,
        dataset_builder=data,
        learning_rate=cli.sft.learning_rate or SFT_RATES.of(cli.model_name),
        lr_schedule=_supervised_schedule(cli),
        num_epochs=cli.sft.num_epochs,
    )


def _supervised_schedule(cli: CLIConfig) -> Any:
    """A linear decay, as in other supervised runs, unless a schedule other than reinforcement learning's constant one
    is set.
    """
    return "linear" if cli.lr_schedule == "constant" else cli.lr_schedule


def preference_model_config(cli: CLIConfig, log_path: Path, warm_path: str | None) -> sl_train.Config:
    """Stage 2, from the weights of stage 1."""
    cli = for_model(cli)
    data = ChatDatasetBuilderFromComparisons(
        common_config=chat_settings(cli), comparison_builder=comparison_source(cli), swap=True
    )
    has_test = data.comparison_builder.get_rows()[1] is not None
    return stage_config(
        cli,
        sl_train.Config,
        log_path,
        PREFERENCE_MODEL,
        warm_path,
        dataset_builder=data,
        learning_rate=cli.preference.learning_rate or PREFERENCE_RATES.of(cli.model_name),
        lr_schedule=_supervised_schedule(cli),
        num_epochs=cli.preference.num_epochs,
        evaluator_builders=[*cli.evaluator_builders, *([partial(label_accuracy, data)] if has_test else [])],
    )


def rl_config(cli: CLIConfig, log_path: Path, warm_path: str | None, judge_path: str | None) -> rl_train.Config:
    """Stage 3, from the weights of stage 1, judged by the model of stage 2."""
    cli = for_model(cli)
    data = cli.fill(
        PairwisePreferenceRLDatasetBuilder,
        comparison_builder=comparison_source(cli),
        preference_model_builder=cli.fill(PreferenceModelBuilderFromChatRenderer, rm_weights_path=judge_path),
        policy_model_name=cli.model_name,
        policy_renderer_name=cli.renderer_name,
        batch_size=cli.groups_per_batch,
        with_test_set=False,
        num_batches=cli.rl_steps if cli.max_steps is None else min(cli.max_steps, cli.rl_steps),
    )
    has_test = data.comparison_builder.get_rows()[1] is not None
    return stage_config(
        cli,
        rl_train.Config,
        log_path,
        RL,
        warm_path,
        dataset_builder=data,
        evaluator_builders=[
            *cli.evaluator_builders,
            *([partial(win_rate, data, cli.max_tokens or 0, cli.seed)] if has_test else []),
        ],
    )


def finished(stage_path: Path) -> CheckpointRecord | None:
    """The last checkpoint of a completed stage."""
    record = get_last_checkpoint(stage_path) if stage_path.is_dir() else None
    return record if record is not None and record.final else None


def paths_of(stage_path: Path) -> tuple[str, str]:
    """State and sampler weights of a finished stage."""
    record = finished(stage_path)
    if record is None or record.state_path is None or record.sampler_path is None:
        raise CheckpointError(f"{stage_path}: the stage ended without a final checkpoint; run it again")
    return record.state_path, record.sampler_path


async def main(cli: CLIConfig) -> RunSummary:
    if cli.max_steps is not None and cli.max_steps < 1:
        raise ConfigurationError(f"max_steps={cli.max_steps}: must be at least 1")
    # All three configs are checked before the first stage loads anything, except paths that do not exist yet.
    nowhere = Path()
    sl_train.check_config(sft_config(cli, nowhere))
    sl_train.check_config(preference_model_config(cli, nowhere, None))
    rl_train.check_config(rl_config(cli, nowhere, None, None))
    log_path = open_folder(open_log_path(cli, RECIPE, dataset_label(cli.dataset, SHIPPED)), "log_path")
    with one_writer(log_path, "log_path"):
        write_run_metadata(log_path, config=cli, recipe_name=RECIPE)
        if finished(log_path / SFT) is None:
            await sl_train.main(sft_config(cli, log_path))
        warm_path, _ = paths_of(log_path / SFT)
        if finished(log_path / PREFERENCE_MODEL) is None:
            await sl_train.main(preference_model_config(cli, log_path, warm_path))
        _, judge_path = paths_of(log_path / PREFERENCE_MODEL)
        if finished(log_path / RL) is None:
            await rl_train.main(rl_config(cli, log_path, warm_path, judge_path))

    print_changes(log_path / SFT, {"test/nll": "held-out replies"}, {})
    print_changes(log_path / PREFERENCE_MODEL, {"test/accuracy": "held-out comparisons"}, {})
    print_changes(log_path / RL, {"test/win_rate": "against held-out replies"}, {"env/all/format": "rollouts"})
    return summarize(log_path / RL)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
