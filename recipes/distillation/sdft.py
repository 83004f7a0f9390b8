"""Self-distillation from demonstrations: the student learns to answer as it does when it is shown a good answer.

    python -m recipes.distillation.sdft
    python -m recipes.distillation.sdft dataset=mine.jsonl model_name=Qwen/Qwen3-8B
    python -m recipes.distillation.sdft dataset=gsm8k model_name=Qwen/Qwen3-8B reverse=true

The teacher is the initial student, with a demonstration in its prompt; it needs no larger model and no reward. Large
models can use a demonstration without training. The shipped model first learns to, by copying made-up answers, which
reveal nothing about the right ones. Then the KL to the teacher falls (`sdft/kl`), and the student gets more sums right
without a demonstration.
"""

import random

import chz

from recipes.common import (
    TINY_LEARNING_RATE,
    CommonConfig,
    GroupKeys,
    Rates,
    StepKeys,
    dataset_label,
    for_model,
    prompt_room,
    run_config,
)
from recipes.sl_common import DatasetKeys
from recipes.warm_up import BATCH_SIZE, train_first
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.distillation import sdft
from tinker_cookbook.distillation.demonstrations import Demonstration, DemonstrationDataset
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.single_turn import single_turn_group
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, get_renderer_of_model
from tinker_cookbook.rl.item_dataset import evaluation_set
from tinker_cookbook.runs.outcome import RunSummary, print_changes

RECIPE = "distillation.sdft"
SHIPPED = "arithmetic"


@chz.chz(typecheck=True)
class CLIConfig(
    StepKeys,
    GroupKeys,
    DatasetKeys,
    CommonConfig,
    sdft.SDFTOptions,
    rates=Rates(TINY_LEARNING_RATE, 2e-5),
    dataset=SHIPPED,
    test_size=50,
    groups_per_batch=32,
    group_size=2,
    skip_first_n_tokens=0,
    eval_every=10,
):
    """Keys of `python -m recipes.distillation.sdft`."""

    warm_up_steps: int = chz.field(
        default=50,
        doc="supervised steps that teach the shipped model to use a demonstration; no other model gets them",
        validator=chz.validators.ge(0),
    )


def answer_text(item: TaskItem) -> str:
    """The demonstration of an item: its reference in the task's format."""
    return f"<SOLUTION>{item.reference}</SOLUTION>"


def made_up_demonstrations(cli: CLIConfig, items: list[TaskItem]) -> list[list[Message]]:
    """Questions with made-up answers to copy, in the form of the teacher's prompt."""
    rng = random.Random(cli.seed)
    conversations: list[list[Message]] = []
    for _ in range(cli.warm_up_steps * BATCH_SIZE):
        answer = f"<SOLUTION>{rng.randint(0, 40)}</SOLUTION>"
        asked = cli.demo_template.format(question=rng.choice(items).question, golden_answer=answer)
        conversations.append(
            [
                {"role": "system", "content": QA_SYSTEM},
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
        )
    return conversations


async def main(cli: CLIConfig) -> RunSummary:
    cli = for_model(cli)
    task = get_task("qa")
    train, test = load_items(task, cli.dataset or task.default_dataset)
    if len(train) < cli.groups_per_batch:
        raise ConfigurationError(
            f"groups_per_batch={cli.groups_per_batch}, but the dataset has {len(train)} questions; lower it"
        )
    renderer_name = str(cli.renderer_name)
    renderer = get_renderer_of_model(renderer_name, cli.model_name)
    room = prompt_room(cli)

    def ask(item: TaskItem, group_size: int):
        return single_turn_group(task, item, renderer, group_size, max_prompt_tokens=room)

    demonstrations = [Demonstration(item.question, answer_text(item), ask(item, cli.group_size)) for item in train]
    batches = DemonstrationDataset(
        demonstrations, cli.groups_per_batch, cli.max_steps * cli.groups_per_batch, seed=cli.seed
    )
    config = run_config(
        cli,
        sdft.Config,
        sdft.check_config,
        RECIPE,
        [dataset_label(cli.dataset, SHIPPED)],
        system_prompt=cli.system_prompt or QA_SYSTEM,
    )
    if cli.is_tiny and cli.warm_up_steps > 0 and cli.load_checkpoint_path is None:
        path = await train_first(cli, config, made_up_demonstrations(cli, train), renderer_name)
        config = chz.replace(config, load_checkpoint_path=path)
    held_out = evaluation_set(test[: cli.test_size], lambda item, key: ask(item, 1))
    summary = await sdft.main(config, batches, held_out, student_system_prompt=task.system_prompt)
    print_changes(
        config.log_path,
        {"test/env/all/correct": "held-out questions"},
        {"sdft/kl": "rollouts", "env/all/correct": "rollouts"},
    )
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
