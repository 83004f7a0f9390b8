"""Prompt distillation, second half: a student without the prompt learns to reply as the teacher did with it.

    python -m recipes.prompt_distillation.train
    python -m recipes.prompt_distillation.train data=/tmp/languages model_name=Qwen/Qwen3-8B

Without `data` the lines are labelled first (`recipes.prompt_distillation.create_data`, same keys), in the run's
folder. The fraction of held-out lines to which the student, without the prompt, gives the teacher's answer rises
(`test/agreement`).
"""

import re
from functools import partial
from pathlib import Path

import chz

from recipes.common import (
    MAX_TOKENS,
    SL_LEARNING_RATE,
    TINY_LEARNING_RATE,
    Rates,
    for_model,
    open_log_path,
    resolve_model,
)
from recipes.prompt_distillation.create_data import TEST_FILE, TRAIN_FILE, LabelKeys, create_data, read_task
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.distillation.prompt_distillation import AgreementEvaluator, Sampling, read_answer
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder, read_conversations
from tinker_cookbook.supervised.types import ExampleKeys

RECIPE = "prompt_distillation"
RATES = Rates(TINY_LEARNING_RATE, SL_LEARNING_RATE)
LABELLING_KEYS = ("input_path", "prompt_path", "target", "teacher_model", "teacher_checkpoint", "max_lines")
"""Keys that only affect how lines are labelled, not how the student trains."""


@chz.chz(typecheck=True)
class CLIConfig(ExampleKeys, train.SupervisedOptions, LabelKeys, rates=RATES, batch_size=32, num_epochs=4):
    """Keys of `python -m recipes.prompt_distillation.train`."""

    data: str | None = chz.field(default=None, doc=f"folder with {TRAIN_FILE} and {TEST_FILE}; default: made first")


def _check_data(folder: Path) -> None:
    for name in (TRAIN_FILE, TEST_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"data={str(folder)!r} has no {name}; write both files with recipes.prompt_distillation.create_data"
            )


def build_config(cli: CLIConfig, folder: Path, log_path: str) -> train.Config:
    """The supervised run on labelled data. Raises ConfigurationError for every problem that can be found before a
    model is loaded.
    """
    _check_data(folder)
    cli = for_model(cli)
    data = FromConversationFileBuilder(common_config=chat_settings(cli), file_path=str(folder / TRAIN_FILE))
    pattern = re.compile(read_task(cli).answer_pattern)
    lines, answers = [], []
    for row in read_conversations(str(folder / TEST_FILE)):
        answer = read_answer(pattern, get_text_content(row.messages[-1]))
        if answer is None:
            raise ConfigurationError(f"{row.place}: answer_pattern={pattern.pattern!r} finds no answer in the reply")
        lines.append(get_text_content(row.messages[0]))
        answers.append(answer)
    sampling = Sampling(cli.max_tokens or MAX_TOKENS, seed=cli.seed)
    config = cli.fill(
        train.Config,
        log_path=log_path,
        recipe_name=RECIPE,
        dataset_builder=data,
        evaluator_builders=[
            *cli.evaluator_builders,
            partial(AgreementEvaluator, data.renderer, lines, answers, pattern, sampling),
        ],
    )
    train.check_config(config)
    return config


async def main(cli: CLIConfig) -> RunSummary:
    if cli.data is not None:
        if unused := [key for key in LABELLING_KEYS if getattr(cli, key) is not None]:
            raise ConfigurationError(
                f"{', '.join(unused)} and data={cli.data!r}: the data are labelled already; leave out one or the other"
            )
        _check_data(Path(cli.data).expanduser())
    task = read_task(cli)
    resolve_model(cli)
    log_path = open_log_path(cli, RECIPE, f"{len(task.lines)}-lines")
    folder = Path(cli.data).expanduser() if cli.data is not None else Path(log_path) / "data"
    if cli.data is None and not (folder / TRAIN_FILE).is_file():
        await create_data(cli, folder)
    config = build_config(cli, folder, log_path)
    summary = await train.main(config)
    print_changes(
        config.log_path,
        {"test/agreement": "held-out lines", "test/readable": "held-out lines"},
        {"train_mean_nll": "training batches"},
    )
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
