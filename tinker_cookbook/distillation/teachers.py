"""The teacher of a distillation run: its model, the check that it shares the student's vocabulary, and its client.

A teacher scores token ids that the student (or the student's data) chose, so both must use the same ids. This is
checked from the tokenizers, before any weights are loaded.
"""

from collections.abc import Mapping, Sequence

import chz

from tinker_cookbook.clients import SamplingClient, ServiceClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights_config import ScorerConfig, same_model


@chz.chz(typecheck=True)
class TeacherConfig(ScorerConfig):
    """A model to learn from."""


@chz.chz(typecheck=True)
class WithTeacher:
    """The config of a dataset with a teacher."""

    teacher_config: TeacherConfig = chz.field(doc="the teacher on this dataset")


def teachers_by_field(dataset_configs: Sequence[WithTeacher]) -> dict[str, TeacherConfig]:
    """The teacher of each dataset, by its field in the loop's config."""
    return {f"dataset_configs[{i}].teacher_config": config.teacher_config for i, config in enumerate(dataset_configs)}


def check_teachers(
    teachers: Mapping[str, TeacherConfig], student: str, backend: str | None = None, base_url: str | None = None
) -> None:
    """Raise ConfigurationError unless each teacher can be opened and has the vocabulary of `student`; errors name its
    field.

    `backend` and `base_url` are the student's.
    """
    for name, teacher in teachers.items():
        teacher.check(name, backend, base_url)
        check_same_vocabulary(teacher.base_model, student, name)


def check_same_vocabulary(teacher: str, student: str, name: str) -> None:
    """Raise ConfigurationError, which begins with `name`, unless two models' tokenizers map the same ids to the same
    tokens.
    """
    if same_model(teacher, student):
        return
    theirs, ours = get_tokenizer(teacher).get_vocab(), get_tokenizer(student).get_vocab()
    if theirs == ours:
        return
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    example = differing[0]
    raise ConfigurationError(
        f"{name}: base_model={teacher!r} and model_name={student!r} have different vocabularies ({len(theirs)} and "
        f"{len(ours)} tokens; {len(differing)} differ, for example {example!r} is {theirs.get(example)} there and "
        f"{ours.get(example)} here): token probabilities cannot be compared. Choose a teacher of the student's family"
    )


async def open_teachers(service: ServiceClient, teachers: Mapping[str, TeacherConfig]) -> list[SamplingClient]:
    """Open a client for each teacher, in order; equal configs share one. All are checked before the first is loaded."""
    for name, teacher in teachers.items():
        await teacher.origin(name, service)
    opened: dict[TeacherConfig, SamplingClient] = {}
    for name, teacher in teachers.items():
        if teacher not in opened:
            opened[teacher] = await teacher.open(name, service)
    return [opened[teacher] for teacher in teachers.values()]
