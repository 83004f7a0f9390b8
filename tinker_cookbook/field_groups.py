"""Groups of fields that several configs share. A config inherits a group, and may change its defaults and docs in the class
statement (`utils.fields.Defaults`).
"""

from typing import Literal

import chz

from tinker_cookbook.data.rows import OnBadRow
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import FieldGroup, of_value


@chz.chz(typecheck=True)
class Seeded(FieldGroup):
    """A seed."""

    seed: int = chz.field(default=0, doc="seed of everything random")


@chz.chz(typecheck=True)
class SamplingSeed(FieldGroup):
    """A seed of replies."""

    seed: int | None = chz.field(default=0, doc="seed of sampling; None: random")


@chz.chz(typecheck=True)
class CheckpointKey(FieldGroup):
    """Weights to sample from."""

    model_path: str | None = chz.field(
        default=None, doc="sampler weights (tinker://<run>/sampler_weights/<name>); None: the base model"
    )


@chz.chz(typecheck=True)
class ServiceKeys(FieldGroup):
    """Where models run."""

    backend: str | None = chz.field(default=None, doc="local, or tinker (hosted); default: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="with backend=tinker: another server that speaks the protocol")


@chz.chz(typecheck=True)
class ModelKey(FieldGroup):
    """A base model."""

    model_name: str = chz.field(
        doc="base model: a directory, a hub id, or tiny_chat (shipped)", munger=of_value(shipped_model)
    )


@chz.chz(typecheck=True)
class OptionalModelKey(FieldGroup):
    """An optional base model."""

    model_name: str | None = chz.field(default=None, doc="base model: a directory or a hub id")


@chz.chz(typecheck=True)
class RendererKey(FieldGroup):
    """How messages become tokens."""

    renderer_name: str | None = chz.field(
        default=None,
        doc="how messages become tokens; default: the checkpoint's, else the one recommended for the model",
    )


@chz.chz(typecheck=True)
class NamedRenderer(FieldGroup):
    """A renderer without a default."""

    renderer_name: str = chz.field(doc="name of the renderer, which turns messages into tokens")


@chz.chz(typecheck=True)
class AdapterKeys(FieldGroup):
    """The adapter of a training client."""

    lora_rank: int = chz.field(
        default=32, doc="rank of a new adapter (a loaded checkpoint keeps its rank)", validator=chz.validators.gt(0)
    )


@chz.chz(typecheck=True)
class LearningRate(FieldGroup):
    """A learning rate."""

    learning_rate: float = chz.field(default=1e-4, doc="Adam's peak learning rate", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class LongestReply(FieldGroup):
    """How long a reply may be."""

    max_tokens: int = chz.field(default=512, doc="longest reply", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class Temperature(FieldGroup):
    """A sampling temperature."""

    temperature: float = chz.field(default=1.0, doc="sampling temperature; 0 is greedy", validator=chz.validators.ge(0))


@chz.chz(typecheck=True)
class TopP(FieldGroup):
    """Nucleus sampling."""

    top_p: float = chz.field(default=1.0, doc="sample from the likeliest tokens with this total probability; 1: all")


@chz.chz(typecheck=True)
class Truncation(TopP, FieldGroup):
    """Truncation of the sampling distribution."""

    top_k: int = chz.field(default=-1, doc="sample from the k likeliest tokens only; -1: all")
    min_p: float = chz.field(
        default=0.0,
        doc="sample from tokens with at least this fraction of the likeliest one's probability; 0: all (local engine)",
    )


@chz.chz(typecheck=True)
class PromptLimit(FieldGroup):
    """How long a prompt may be."""

    max_prompt_tokens: int | None = chz.field(default=None, doc="longest prompt; None: no limit")


@chz.chz(typecheck=True)
class Epochs(FieldGroup):
    """Passes over data."""

    num_epochs: int = chz.field(default=1, doc="passes over the data", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class Weighted(FieldGroup):
    """One of several with relative weights."""

    weight: float = chz.field(
        default=1.0, doc="its share, relative to that of the others", validator=chz.validators.gt(0)
    )


@chz.chz(typecheck=True)
class BatchSize(FieldGroup):
    """Examples per step."""

    batch_size: int = chz.field(default=16, doc="examples per step")

    @chz.validate
    def _check_batch_size(self) -> None:
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size={self.batch_size}: must be at least 1")


@chz.chz(typecheck=True)
class GroupsPerBatch(FieldGroup):
    """Groups per step."""

    groups_per_batch: int = chz.field(
        default=8, doc="questions, prompts or episodes per step", validator=chz.validators.gt(0)
    )


@chz.chz(typecheck=True)
class GroupSize(FieldGroup):
    """Members of a group."""

    group_size: int = chz.field(default=8, doc="attempts at each", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class GroupSizes(GroupsPerBatch, GroupSize, FieldGroup):
    """Size of a batch of groups."""


@chz.chz(typecheck=True)
class GradientClip(FieldGroup):
    """Gradient clipping."""

    grad_clip_norm: float = chz.field(
        default=0.0, doc="maximum gradient norm; 0: no clipping", validator=chz.validators.ge(0)
    )


@chz.chz(typecheck=True)
class SystemPrompt(FieldGroup):
    """Instructions before the conversation."""

    system_prompt: str | None = chz.field(default=None, doc="system prompt; None: the usual one")


@chz.chz(typecheck=True)
class TurnLimit(FieldGroup):
    """How long an episode may be."""

    max_turns: int = chz.field(default=3, doc="replies per episode", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class RunFolder(FieldGroup):
    """The folder of a run."""

    log_path: str = chz.field(doc="folder of the run")


@chz.chz(typecheck=True)
class OptionalRunFolder(FieldGroup):
    """An optional folder of a run."""

    log_path: str | None = chz.field(
        default=None,
        doc="folder of the run; default: a new one under TINKER_DEBATE_LOG_ROOT or <user data>/tinker-cookbook",
    )


@chz.chz(typecheck=True)
class BadRowKey(FieldGroup):
    """Rows that cannot be used."""

    on_bad_row: OnBadRow = chz.field(
        default="raise", doc="a malformed row, or one that cannot be trained on: raise, or skip and count it"
    )


@chz.chz(typecheck=True)
class EvaluatedItems(FieldGroup):
    """The items of an evaluator, and the name of its metrics."""

    name: str = chz.field(default="test", doc="prefix of the metrics")
    split: Literal["train", "test"] = chz.field(default="test", doc="which items of a task of this library")


@chz.chz(typecheck=True)
class ItemLimit(FieldGroup):
    """How many items are used."""

    max_items: int = chz.field(default=100, doc="maximum number of items", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class TestDataset(FieldGroup):
    """Separate test data."""

    test_dataset: str | None = chz.field(default=None, doc="held-out items, if the dataset has no test split")
