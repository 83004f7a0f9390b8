"""The teacher of a distillation: which model it is, whether it shares the student's vocabulary, and its client.

A teacher is asked for the probabilities of token ids that the student (or the student's data) chose, so both must number
their tokens alike. That is checked from the tokenizers, before any weight is loaded.
"""

from collections.abc import Sequence
from pathlib import Path

import chz

from tinker_cookbook import backends
from tinker_cookbook.clients import SamplingClient, ServiceClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tokenizer_utils import get_tokenizer


@chz.chz(typecheck=True)
class TeacherConfig:
    """A model to learn from."""

    base_model: str = chz.field(doc="base model of the teacher: a directory or a hub id")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="sampler weights on top of it (tinker://<run>/sampler_weights/<name>); None: the base model"
    )

    @chz.validate
    def _check(self) -> None:
        path = self.load_checkpoint_path
        if path is not None and "/sampler_weights/" not in path:
            raise ConfigurationError(
                f"load_checkpoint_path={path!r} of the teacher is no path of sampler weights; use a checkpoint's "
                "sampler_path (tinker://<run>/sampler_weights/<name>)"
            )


def check_teachers(
    teachers: Sequence[TeacherConfig], student: str, backend: str | None = None, base_url: str | None = None
) -> None:
    """Raise ConfigurationError unless each teacher is a model of this backend with the vocabulary of `student`."""
    for teacher in teachers:
        backends.check_backend(backend, teacher.base_model, base_url)
        check_same_vocabulary(teacher.base_model, student)


def check_same_vocabulary(teacher: str, student: str) -> None:
    """Raise ConfigurationError unless the tokenizers of two models give the same number to the same token."""
    if teacher == student:
        return
    theirs, ours = get_tokenizer(teacher).get_vocab(), get_tokenizer(student).get_vocab()
    if theirs == ours:
        return
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    example = differing[0]
    raise ConfigurationError(
        f"teacher base_model={teacher!r} and model_name={student!r} have different vocabularies ({len(theirs)} and "
        f"{len(ours)} tokens; {len(differing)} differ, for example {example!r} is {theirs.get(example)} there and "
        f"{ours.get(example)} here): token probabilities cannot be compared. Choose a teacher of the student's family"
    )


async def open_teacher(service: ServiceClient, teacher: TeacherConfig) -> SamplingClient:
    """The teacher's client.

    Raises ConfigurationError when its checkpoint belongs to another base model; what is loaded then is unknown otherwise.
    """
    path = teacher.load_checkpoint_path
    if path is None:
        return await service.create_sampling_client(base_model=teacher.base_model)
    training_run = await service.create_rest_client().get_training_run_by_tinker_path_async(path)
    if not _same_model(training_run.base_model, teacher.base_model):
        raise ConfigurationError(
            f"the teacher's load_checkpoint_path={path!r} is a checkpoint of {training_run.base_model!r}, not of "
            f"base_model={teacher.base_model!r}; set base_model to that"
        )
    return await service.create_sampling_client(model_path=path)


async def open_teachers(service: ServiceClient, teachers: Sequence[TeacherConfig]) -> list[SamplingClient]:
    """One client per config, in order; equal configs share one."""
    opened: dict[TeacherConfig, SamplingClient] = {}
    for teacher in teachers:
        if teacher not in opened:
            opened[teacher] = await open_teacher(service, teacher)
    return [opened[teacher] for teacher in teachers]


def _same_model(one: str, other: str) -> bool:
    if one == other:
        return True
    folders = [Path(name).expanduser() for name in (one, other)]
    return all(folder.is_dir() for folder in folders) and folders[0].resolve() == folders[1].resolve()
