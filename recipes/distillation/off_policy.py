"""Off-policy distillation: on given conversations, learn the teacher's probabilities instead of the tokens alone.

    python -m recipes.distillation.off_policy
    python -m recipes.distillation.off_policy dataset=tulu3 model_name=Qwen/Qwen3-8B teacher_model=Qwen/Qwen3-32B

By default the shipped model is first fine-tuned on the conversations, and a fresh student learns from that teacher.
The KL to the teacher on held-out conversations falls (`test/kl`).
"""

import chz

from recipes.common import (
    SL_LEARNING_RATE,
    dataset_label,
    positive,
    rate_doc,
    run_config,
    with_defaults_of_model,
)
from recipes.distillation.teacher import (
    TINY_TEACHER_LEARNING_RATE,
    TeacherKeys,
    make_teacher,
    named_teacher,
    teacher_run,
)
from recipes.sl_common import HUB_DOC, chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.epochs import TEST_SIZE, not_negative
from tinker_cookbook.data.rows import OnBadRow
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised.hub import HubOptions, chat_dataset_builder

RECIPE = "distillation.off_policy"
SHIPPED = "conversations"


@chz.chz(typecheck=True)
class CLIConfig(TeacherKeys, train_off_policy.OffPolicyOptions):
    """Keys of `python -m recipes.distillation.off_policy`."""

    dataset: str = chz.field(
        default=SHIPPED, doc="conversations (shipped), a .jsonl/.csv/.parquet file, or a hub id (owner/name)"
    )
    test_size: int | None = chz.field(
        default=None,
        doc=f"conversations held out; default: {TEST_SIZE}, of fewer than {2 * TEST_SIZE} a tenth",
        validator=not_negative,
    )
    batch_size: int = chz.field(default=16, doc="rows per step", validator=chz.validators.gt(0))
    num_epochs: int = chz.field(
        default=4,
        doc="times that the dataset which takes longest is gone through; the others begin again meanwhile",
        validator=chz.validators.gt(0),
    )
    max_length: int = chz.field(
        default=512, doc="longest conversation in tokens; the rest is cut", validator=chz.validators.gt(1)
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="which tokens train: " + ", ".join(TrainOnWhat)
    )
    on_bad_row: OnBadRow = chz.field(
        default="raise", doc="a malformed row, or one that cannot be trained on: raise, or skip and count it"
    )
    hub: HubOptions | None = chz.field(default=None, doc=HUB_DOC)
    learning_rate: float | None = chz.field(
        default=None,
        doc=rate_doc("Adam's learning rate", TINY_TEACHER_LEARNING_RATE, SL_LEARNING_RATE),
        validator=positive,
    )
    eval_every: int = chz.field(
        default=6, doc="evaluate before every n-th batch and at the end; 0: never", validator=chz.validators.ge(0)
    )
    save_every: int = chz.field(
        default=20, doc="save a checkpoint after every n-th batch; 0: not by batches", validator=chz.validators.ge(0)
    )


def build_config(cli: CLIConfig) -> tuple[train_off_policy.Config, bool]:
    """The run's full config, and whether its teacher has to be made first. Raises ConfigurationError with the fix."""
    cli = with_defaults_of_model(cli, TINY_TEACHER_LEARNING_RATE, SL_LEARNING_RATE)
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
