"""The teacher of the distillation recipes: the named one, or one made by a short supervised run.

The latter is an adapter on the student's base model, trained in the run's folder `teacher`. A resumed run continues
its training, or uses it if it is complete.
"""

import chz

from recipes.common import SL_LEARNING_RATE, CommonConfig, Rates
from recipes.sl_common import stage_before
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint, newest_of_run
from tinker_cookbook.runs.config import RunConfig
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.types import SupervisedDatasetBuilder

TEACHER_RATES = Rates(2e-3, SL_LEARNING_RATE)


@chz.chz(typecheck=True)
class TeacherKeys:
    """The teacher."""

    teacher_model: str | None = chz.field(default=None, doc="base model of the teacher; default: the student's")
    teacher_checkpoint: str | None = chz.field(
        default=None,
        doc="sampler weights of the teacher: tinker://<run>/sampler_weights/<name>, or a run's folder, for its newest checkpoint",
        munger=lambda self, path: newest_of_run(path, "sampler_path"),
    )


@chz.chz(typecheck=True)
class DistillationConfig(TeacherKeys, CommonConfig):
    """Keys of the recipes that make a teacher if none is named."""

    teacher_epochs: int = chz.field(
        default=6, doc="passes over the data that make the teacher, where none is named", validator=chz.validators.gt(0)
    )


def named_teacher(cli: DistillationConfig) -> TeacherConfig | None:
    """The teacher named by resolved keys; None if it has to be made, which is only supported for the shipped model.

    Raises ConfigurationError for another model without a teacher, or a checkpoint without sampler weights.
    """
    if cli.teacher_model is None and cli.teacher_checkpoint is None:
        if not cli.is_tiny:
            raise ConfigurationError(
                f"model_name={cli.model_name!r} needs a teacher: set teacher_model to a larger model of its family, or "
                "teacher_checkpoint to sampler weights"
            )
        return None
    return TeacherConfig(base_model=cli.teacher_model or cli.model_name, load_checkpoint_path=cli.teacher_checkpoint)


def teacher_run(cli: DistillationConfig, config: RunConfig, dataset_builder: SupervisedDatasetBuilder) -> train.Config:
    """The supervised run that makes a teacher on `config.model_name`."""
    return stage_before(
        cli,
        config,
        "teacher",
        dataset_builder,
        renderer_name=config.renderer_name,
        load_checkpoint_path=None,
        learning_rate=TEACHER_RATES.of(cli.model_name),
        num_epochs=cli.teacher_epochs,
    )


async def make_teacher(config: train.Config) -> TeacherConfig:
    """Run or resume the training of the teacher."""
    await train.main(config)
    record = get_last_checkpoint(config.log_path, "sampler_path")
    if record is None or not record.final:
        raise CheckpointError(f"{config.log_path} has no finished teacher; delete the folder and start over")
    return TeacherConfig(base_model=config.model_name, load_checkpoint_path=record.sampler_path)
