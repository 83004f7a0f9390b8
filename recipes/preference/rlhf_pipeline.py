"""Reinforcement learning from human feedback in its three classical stages, each in a folder of its own:

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
    MAX_TOKENS_DOC,
    RL_LEARNING_RATE,
    RL_SHARE,
    SL_LEARNING_RATE,
    TINY_LEARNING_RATE,
    R,
    dataset_label,
    learning_rate_for,
    max_tokens_for,
    open_log_path,
    positive,
    rate_doc,
    resolve_model,
)
from recipes.preference.data import SHIPPED, ComparisonConfig, comparison_source
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.preference.comparison_policy_evaluator import ComparisonEvaluator, LabelAccuracyEvaluator
from tinker_cookbook.preference.envs import PairwisePreferenceRLDatasetBuilder
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonDatasetBuilder,
    ComparisonRow,
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

RECIPE = "rlhf_pipeline"
SFT, PREFERENCE_MODEL, RL = "sft", "preference_model", "rl"
TINY_SFT_RATE, TINY_PREFERENCE_RATE = 1e-2, 2e-3
"""The shipped data are few, and the tiny model has to learn a new style and a new task from them."""


@chz.chz(typecheck=True)
class CLIConfig(ComparisonConfig, RLOptions):
    """Keys of `python -m recipes.preference.rlhf_pipeline`."""

    demonstrations: Literal["both", "chosen"] = chz.field(
        default="both", doc="what the warm start imitates: both replies of a comparison, or the chosen one"
    )
    sft_epochs: int = chz.field(default=3, doc="passes of the warm start", validator=chz.validators.gt(0))
    preference_epochs: int = chz.field(default=3, doc="passes of the preference model", validator=chz.validators.gt(0))
    sft_learning_rate: float | None = chz.field(
        default=None, doc=rate_doc("of the warm start", TINY_SFT_RATE, SL_LEARNING_RATE), validator=positive
    )
    preference_learning_rate: float | None = chz.field(
        default=None,
        doc=rate_doc("of the preference model", TINY_PREFERENCE_RATE, SL_LEARNING_RATE),
        validator=positive,
    )
    rl_learning_rate: float | None = chz.field(
        default=None,
        doc=rate_doc("of the last stage", TINY_LEARNING_RATE, RL_LEARNING_RATE, RL_SHARE),
        validator=positive,
    )
    rl_steps: int = chz.field(default=10, doc="steps of the last stage", validator=chz.validators.gt(0))
    groups_per_batch: int = chz.field(
        default=8, doc="prompts per step of the last stage", validator=chz.validators.gt(0)
    )
    group_size: int = chz.field(default=4, doc="replies per prompt", validator=chz.validators.gt(1))
    max_tokens: int | None = chz.field(default=None, doc=MAX_TOKENS_DOC, validator=positive)
    max_steps: int | None = chz.field(default=None, doc="no stage takes more steps than this")
    eval_every: int = chz.field(
        default=10, doc="evaluate before every n-th batch and at the end; 0: never", validator=chz.validators.ge(0)
    )


@chz.chz(typecheck=True)
class DemonstrationsBuilder(ChatDatasetBuilder):
    """The replies of comparisons as conversations to imitate."""

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="where the comparisons come from")
    demonstrations: Literal["both", "chosen"] = chz.field(doc="which replies")

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


@chz.chz(typecheck=True)
class LabelAccuracyBuilder:
    """Evaluates the preference model in training on the held-out comparisons."""

    data: ChatDatasetBuilderFromComparisons = chz.field(doc="tokenizer, renderer and comparisons")

    def __call__(self) -> LabelAccuracyEvaluator:
        _, test = self.data.comparison_builder.get_labeled_comparisons()
        return LabelAccuracyEvaluator(test or [], self.data.renderer)


@chz.chz(typecheck=True)
class WinRateBuilder:
    """Lets the policy compete with the replies A of the held-out comparisons; the preference model judges."""

    data: PairwisePreferenceRLDatasetBuilder = chz.field(doc="prompts, judge, tokenizer and renderer")
    max_tokens: int = chz.field(doc="longest reply")
    seed: int = chz.field(doc="seed of the replies")

    def __call__(self) -> ComparisonEvaluator:
        _, test = self.data.comparison_builder.get_labeled_comparisons()
        return ComparisonEvaluator(
            self.data.preference_model_builder,
            [one.comparison for one in test or []],
            self.data.policy_renderer_name,
            self.data.policy_model_name,
            max_tokens=self.max_tokens,
            seed=self.seed,
            name="test",
        )


def for_model(cli: CLIConfig) -> CLIConfig:
    """The keys with the model's path and renderer, checked, and with the model's defaults."""
    model, renderer_name = resolve_model(cli)
    return chz.replace(
        cli,
        model_name=model,
        renderer_name=renderer_name,
        sft_learning_rate=cli.sft_learning_rate or learning_rate_for(model, TINY_SFT_RATE, SL_LEARNING_RATE),
        preference_learning_rate=cli.preference_learning_rate
        or learning_rate_for(model, TINY_PREFERENCE_RATE, SL_LEARNING_RATE),
        rl_learning_rate=cli.rl_learning_rate
        or learning_rate_for(model, TINY_LEARNING_RATE, RL_LEARNING_RATE, RL_SHARE),
        max_tokens=cli.max_tokens or max_tokens_for(model),
    )


def stage_config(cli: CLIConfig, config_cls: type[R], log_path: Path, stage: str, start: str | None, **own: Any) -> R:
    """The config of a stage from resolved keys and `own`. `start`: the weights to start from."""
    return cli.fill(
        config_cls,
        log_path=str(log_path / stage),
        recipe_name=f"{RECIPE}/{stage}",
        load_checkpoint_path=start,
        wandb_name=cli.wandb_name and f"{cli.wandb_name}-{stage}",
        **own,
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
        learning_rate=cli.sft_learning_rate,
        lr_schedule=_supervised_schedule(cli),
        num_epochs=cli.sft_epochs,
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
        learning_rate=cli.preference_learning_rate,
        lr_schedule=_supervised_schedule(cli),
        num_epochs=cli.preference_epochs,
        evaluator_builders=[*cli.evaluator_builders, *([LabelAccuracyBuilder(data=data)] if has_test else [])],
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
        learning_rate=cli.rl_learning_rate,
        evaluator_builders=[*cli.evaluator_builders, *([cli.fill(WinRateBuilder, data=data)] if has_test else [])],
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
