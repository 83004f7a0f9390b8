"""On-policy distillation: the student answers, and a teacher says of each token how likely it would have been to it.

    python -m recipes.distillation.on_policy
    python -m recipes.distillation.on_policy dataset=deepmath model_name=Qwen/Qwen3-8B teacher_model=Qwen/Qwen3-32B

There is no reward. By default the shipped model is first fine-tuned on right answers to small sums; a fresh student,
which gets every second sum wrong, then learns from that teacher on its own samples. The KL to the teacher falls
(`teacher_kl`), and the student gets more held-out sums right.
"""

from pathlib import Path

import chz

from recipes.common import (
    MAX_TOKENS_DOC,
    TINY_LEARNING_RATE,
    dataset_label,
    positive,
    prompt_room,
    rate_doc,
    run_config,
    with_defaults_of_model,
)
from recipes.distillation.teacher import TeacherKeys, make_teacher, named_teacher, teacher_run
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
LEARNING_RATE = 1e-4


@chz.chz(typecheck=True)
class CLIConfig(TeacherKeys, train_on_policy.OnPolicyOptions):
    """Keys of `python -m recipes.distillation.on_policy`."""

    dataset: str = chz.field(
        default=SHIPPED, doc="arithmetic (shipped sums), a .txt or .jsonl file of prompts, deepmath, tulu3, or a hub id"
    )
    teacher_epochs: int = chz.field(
        default=2, doc="passes over the sums that make the teacher, where none is named", validator=chz.validators.gt(0)
    )
    test_size: int = chz.field(default=50, doc="prompts held out", validator=chz.validators.ge(0))
    groups_per_batch: int = chz.field(default=32, doc="prompts per step", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=4, doc="attempts per prompt", validator=chz.validators.gt(0))
    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))
    max_tokens: int | None = chz.field(default=None, doc=MAX_TOKENS_DOC, validator=positive)
    learning_rate: float | None = chz.field(
        default=None, doc=rate_doc("Adam's learning rate", TINY_LEARNING_RATE, LEARNING_RATE), validator=positive
    )
    eval_every: int = chz.field(
        default=10, doc="evaluate before every n-th batch and at the end; 0: never", validator=chz.validators.ge(0)
    )


def build_config(cli: CLIConfig) -> tuple[train_on_policy.Config, bool]:
    """The run's full config, and whether its teacher has to be made first. Raises ConfigurationError with the fix."""
    cli = with_defaults_of_model(cli, TINY_LEARNING_RATE, LEARNING_RATE)
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
