"""On-policy distillation: the student answers, and a teacher scores each of its tokens by the teacher's probability.

    python -m recipes.distillation.on_policy
    python -m recipes.distillation.on_policy dataset=deepmath model_name=Qwen/Qwen3-8B teacher_model=Qwen/Qwen3-32B

The data are prompts: arithmetic (shipped sums), a .txt or .jsonl file, deepmath, tulu3, or a hub id. There is no reward.
By default the shipped model is first fine-tuned on right answers to small sums; a fresh student, which gets every second
sum wrong, then learns from that teacher on its own samples. The KL to the teacher falls (`teacher_kl`), and the student
gets more held-out sums right.
"""

from pathlib import Path

import chz

from recipes.common import (
    TINY_LEARNING_RATE,
    GroupKeys,
    Rates,
    StepKeys,
    dataset_label,
    for_model,
    prompt_room,
    run_config,
)
from recipes.distillation.teacher import DistillationConfig, make_teacher, named_teacher, teacher_run
from recipes.sl_common import DatasetKeys
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDatasetBuilder
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.single_turn import TaskEvaluatorBuilder
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.utils.files import write_jsonl

RECIPE = "distillation.on_policy"
SHIPPED = "arithmetic"


@chz.chz(typecheck=True)
class CLIConfig(
    StepKeys,
    GroupKeys,
    DatasetKeys,
    DistillationConfig,
    train_on_policy.OnPolicyOptions,
    rates=Rates(TINY_LEARNING_RATE, 1e-4),
    dataset=SHIPPED,
    test_size=50,
    teacher_epochs=2,
    groups_per_batch=32,
    group_size=4,
    eval_every=10,
):
    """Keys of `python -m recipes.distillation.on_policy`."""


def build_config(cli: CLIConfig) -> tuple[train_on_policy.Config, bool]:
    """The run's full config, and whether its teacher has to be made first. Raises ConfigurationError with the fix."""
    cli = for_model(cli)
    teacher, shipped = named_teacher(cli), cli.dataset == SHIPPED
    if teacher is None and not shipped:
        raise ConfigurationError(
            f"dataset={cli.dataset!r} has no answers to make a teacher from; name one by teacher_model or "
            f"teacher_checkpoint, or use dataset={SHIPPED}"
        )
    evaluator = cli.fill(TaskEvaluatorBuilder, name="held_out", task="qa", dataset=None, split="test")
    prompts = cli.fill(
        PromptOnlyDatasetBuilder,
        dataset_name=str(EXAMPLE_DATA / "qa" / "arithmetic_train.jsonl") if shipped else cli.dataset,
        model_name_for_tokenizer=cli.model_name,
        convo_prefix=[{"role": "system", "content": QA_SYSTEM}] if shipped else None,
        max_prompt_tokens=prompt_room(cli),
        num_epochs=cli.max_steps * cli.groups_per_batch,  # large enough for few prompts too: max_steps is the limit
    )
    data = cli.fill(
        DistillationDatasetConfig,
        dataset_builder=prompts,
        teacher_config=teacher or TeacherConfig(base_model=cli.model_name),
    )
    config = run_config(
        cli,
        train_on_policy.Config,
        train_on_policy.check_config,
        RECIPE,
        [dataset_label(cli.dataset, SHIPPED)],
        dataset_configs=[data],
        evaluator_builders=[*cli.evaluator_builders, *([evaluator] if shipped else [])],
    )
    return config, teacher is None


def write_right_answers(path: Path) -> None:
    """Write the shipped sums with their answers, as conversations for the teacher."""
    items, _ = load_items(get_task("qa", None), SHIPPED)
    rows = [
        {
            "messages": [
                {"role": "system", "content": QA_SYSTEM},
                {"role": "user", "content": item.question},
                {"role": "assistant", "content": f"<SOLUTION>{item.reference}</SOLUTION>"},
            ]
        }
        for item in items
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, rows)


async def main(cli: CLIConfig) -> RunSummary:
    config, teacher_is_missing = build_config(cli)
    if teacher_is_missing:
        data = config.dataset_configs[0]
        file = Path(config.log_path) / "teacher.jsonl"
        write_right_answers(file)
        common = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=config.model_name,
            renderer_name=str(config.renderer_name),
            max_length=None,
            batch_size=32,
        )
        answers = FromConversationFileBuilder(common_config=common, file_path=str(file))
        teacher = await make_teacher(teacher_run(cli, config, answers))
        config = chz.replace(config, dataset_configs=[chz.replace(data, teacher_config=teacher)])
    summary = await train_on_policy.main(config)
    print_changes(
        config.log_path,
        {"test/teacher_kl": "held-out prompts", "held_out/env/all/correct": "held-out sums"},
        {"teacher_kl": "rollouts"},
    )
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
