"""Off-policy distillation: on given conversations, learn the teacher's probabilities instead of the tokens alone.

    python -m recipes.distillation.off_policy
    python -m recipes.distillation.off_policy dataset=tulu3 model_name=Qwen/Qwen3-8B teacher_model=Qwen/Qwen3-32B

Without a named teacher the shipped model is fine-tuned on the conversations first, and a fresh student learns from that. The
KL to the teacher on held-out conversations falls (`test/kl`).
"""

import chz

from recipes.common import (
    SL_LEARNING_RATE,
    TINY_CHAT,
    dataset_label,
    learning_rate,
    open_log_path,
    resolve_model,
    run_settings,
)
from recipes.distillation.teacher import (
    TINY_TEACHER_LEARNING_RATE,
    TeacherKeys,
    make_teacher,
    named_teacher,
    teacher_run,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.runs.outcome import print_changes
from tinker_cookbook.supervised.hub import chat_dataset_builder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RECIPE = "distillation.off_policy"
SHIPPED = "conversations"


@chz.chz(typecheck=True)
class CLIConfig(TeacherKeys):
    """Keys of `python -m recipes.distillation.off_policy`."""

    dataset: str = chz.field(
        default=SHIPPED, doc="conversations (shipped), a .jsonl file, or a Hugging Face dataset id (owner/name)"
    )
    test_size: int = chz.field(default=32, doc="conversations held out", validator=chz.validators.ge(0))
    batch_size: int = chz.field(default=16, doc="conversations per step", validator=chz.validators.gt(0))
    num_epochs: int = chz.field(default=4, doc="passes over the data", validator=chz.validators.gt(0))
    max_length: int = chz.field(
        default=512, doc="longest conversation in tokens; the rest is cut", validator=chz.validators.gt(1)
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="which tokens train: " + ", ".join(TrainOnWhat)
    )
    n_teacher_targets: int = chz.field(
        default=20,
        doc="the teacher's likeliest tokens that are learnt at each position",
        validator=chz.validators.gt(0),
    )
    teacher_concurrency: int = chz.field(
        default=64, doc="sequences that the teacher is asked about at a time", validator=chz.validators.gt(0)
    )
    learning_rate: float | None = chz.field(
        default=None,
        doc=f"default: {TINY_TEACHER_LEARNING_RATE:g} for tiny_chat, {SL_LEARNING_RATE:g} for other models",
    )
    eval_every: int = chz.field(
        default=6, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )


def build_config(cli: CLIConfig) -> tuple[train_off_policy.Config, bool]:
    """The run's full config, and whether its teacher is yet to be made. Raises ConfigurationError with the mend."""
    model, renderer_name = resolve_model(cli)
    teacher = named_teacher(cli, model)
    settings = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=renderer_name,
        max_length=cli.max_length,
        batch_size=cli.batch_size,
        train_on_what=cli.train_on_what,
    )
    usual = TINY_TEACHER_LEARNING_RATE if cli.model_name == TINY_CHAT else SL_LEARNING_RATE
    config = train_off_policy.Config(
        **run_settings(cli, RECIPE, model),
        learning_rate=learning_rate(cli, usual if cli.learning_rate is None else cli.learning_rate, usual),
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(
                dataset_builder=chat_dataset_builder(cli.dataset, settings, cli.test_size, cli.seed),
                teacher_config=teacher or TeacherConfig(base_model=model),
            )
        ],
        n_teacher_targets=cli.n_teacher_targets,
        teacher_concurrency=cli.teacher_concurrency,
        batch_size=cli.batch_size,
        num_epochs=cli.num_epochs,
    )
    train_off_policy.check_config(config)
    folder = open_log_path(cli, RECIPE, dataset_label(cli.dataset, SHIPPED))
    return chz.replace(config, log_path=folder), teacher is None


async def main(cli: CLIConfig) -> None:
    config, teacher_is_missing = build_config(cli)
    if teacher_is_missing:
        data = config.dataset_configs[0]
        teacher = await make_teacher(teacher_run(cli, config, data.dataset_builder))
        config = chz.replace(config, dataset_configs=[chz.replace(data, teacher_config=teacher)])
    await train_off_policy.main(config)
    print_changes(
        config.log_path,
        {"test/kl": "held-out conversations", "test/nll": "held-out conversations"},
        {"train/kl": "training batches"},
    )


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
