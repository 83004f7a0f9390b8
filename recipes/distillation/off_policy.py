"""Off-policy distillation: on given conversations, learn the teacher's probabilities instead of only the tokens.

    python -m recipes.distillation.off_policy
    python -m recipes.distillation.off_policy dataset=tulu3 model_name=Qwen/Qwen3-8B teacher_model=Qwen/Qwen3-32B

By default the shipped model is first fine-tuned on the conversations, and a fresh student learns from that teacher.
The KL to the teacher on held-out conversations falls (`test/kl`).
"""

import chz

from recipes.common import dataset_label, for_model, run_config
from recipes.distillation.teacher import TEACHER_RATES, DistillationConfig, make_teacher, named_teacher, teacher_run
from recipes.sl_common import ChatKeys, DatasetKeys, chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised.hub import chat_dataset_builder

RECIPE = "distillation.off_policy"
SHIPPED = "conversations"


@chz.chz(typecheck=True)
class CLIConfig(
    DatasetKeys,
    ChatKeys,
    DistillationConfig,
    train_off_policy.OffPolicyOptions,
    rates=TEACHER_RATES,
    split_rewritten=False,
    num_epochs=4,
    eval_every=6,
):
    """Keys of `python -m recipes.distillation.off_policy`."""


def build_config(cli: CLIConfig) -> tuple[train_off_policy.Config, bool]:
    """The run's full config, and whether its teacher has to be made first. Raises ConfigurationError with the fix."""
    cli = for_model(cli)
    teacher = named_teacher(cli)
    data = train_off_policy.DatasetWithTeacher(
        dataset_builder=chat_dataset_builder(cli.dataset, chat_settings(cli), cli.test_size, cli.seed, cli.hub),
        teacher_config=teacher or TeacherConfig(base_model=cli.model_name),
    )
    folder = [dataset_label(cli.dataset, SHIPPED)]
    check = train_off_policy.check_config
    return run_config(cli, train_off_policy.Config, check, RECIPE, folder, dataset_configs=[data]), teacher is None


async def main(cli: CLIConfig) -> RunSummary:
    config, teacher_is_missing = build_config(cli)
    if teacher_is_missing:
        data = config.dataset_configs[0]
        teacher = await make_teacher(teacher_run(cli, config, data.dataset_builder))
        config = chz.replace(config, dataset_configs=[chz.replace(data, teacher_config=teacher)])
    summary = await train_off_policy.main(config)
    print_changes(
        config.log_path,
        {"test/kl": "held-out conversations", "test/nll": "held-out conversations"},
        {"train/kl": "training batches"},
    )
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
