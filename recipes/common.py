"""Shared parts of the recipes: common keys, the shipped model's name, and the folder of a run."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import chz

from tinker_cookbook import backends, variables
from tinker_cookbook.cli_utils import LogdirBehavior, check_log_dir, default_log_path
from tinker_cookbook.data.rows import is_data_file
from tinker_cookbook.data.shipped import is_tiny, shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import GroupSizes, OptionalRunFolder
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.hyperparameters import known_lr
from tinker_cookbook.plugins import full_reference, is_reference
from tinker_cookbook.renderers import get_renderer_of_model
from tinker_cookbook.runs.bootstrap import note_log_path
from tinker_cookbook.runs.config import RunConfig, RunOptions
from tinker_cookbook.utils import fields
from tinker_cookbook.utils.fields import FieldGroup, override, positive_or_none
from tinker_cookbook.utils.session_naming import default_cookbook_session_name

T = TypeVar("T")
C = TypeVar("C", bound="CommonConfig")
R = TypeVar("R", bound=RunConfig)

TINY_CHAT, TINY_DEBATE = "tiny_chat", "tiny_debate"

TINY_LEARNING_RATE, TINY_MAX_TOKENS, TINY_CONTEXT = 1e-3, 64, 1024
"""Defaults for models of a million parameters, such as the shipped ones; a real one needs a lower rate and longer replies."""
RL_LEARNING_RATE, SL_LEARNING_RATE, MAX_TOKENS = 4e-5, 2e-4, 512
"""First defaults for real models; rank does not matter, model size and data do."""
RL_SHARE = 0.1
"""Fraction of `get_lr`, which is for supervised learning; below it, the RL loop warns."""


def default_model(shipped: str = TINY_CHAT) -> str:
    """The default model of a recipe: TINKER_DEBATE_BASE_MODEL, else this shipped model."""
    return backends.shipped.default_model(shipped)


def tiny_debate() -> str:
    """The same with the model of the shipped debates."""
    return default_model(TINY_DEBATE)


class Rates(NamedTuple):
    """The default learning rate of a recipe by model."""

    tiny: float
    """for tiny models: shipped ones, and others made by `tools/`"""
    usual: float
    """for other models"""
    share_of_get_lr: float = 0.0
    """if set, a known model gets this fraction of `get_lr` instead of `usual`"""

    def of(self, model: str) -> float:
        if is_tiny(model):
            return self.tiny
        known = known_lr(model) if self.share_of_get_lr else None
        return self.usual if known is None else self.share_of_get_lr * known

    @property
    def doc(self) -> str:
        share = "" if self.share_of_get_lr == 1 else f"{self.share_of_get_lr:g} times "
        known = f"{share}hyperparam_utils.get_lr where it knows the model, else " if self.share_of_get_lr else ""
        return (
            f"default: {self.tiny:g} for tiny models (shipped, or made by `tools/`), {known}{self.usual:g} for others"
        )


RL_RATES = Rates(TINY_LEARNING_RATE, RL_LEARNING_RATE, RL_SHARE)
SL_RATES = Rates(TINY_LEARNING_RATE, SL_LEARNING_RATE, 1)


def max_tokens_for(model: str) -> int:
    """The default completion length of a model. Tiny models with a longer context are made for longer answers."""
    if not is_tiny(model):
        return MAX_TOKENS
    return TINY_MAX_TOKENS * max(1, (model_info.get_context_length(model) or 0) // TINY_CONTEXT)


@chz.chz(typecheck=True)
class DefaultModel(FieldGroup):
    """The base model."""

    model_name: str = chz.field(
        default_factory=default_model,
        doc="a shipped model (tiny_chat, tiny_debate), a model directory, or a hub id such as Qwen/Qwen3-4B-Instruct-2507; "
        "TINKER_DEBATE_BASE_MODEL changes the default",
    )


@chz.chz(typecheck=True)
class RateKey(FieldGroup):
    """A learning rate that depends on the model."""

    learning_rate: float | None = chz.field(
        default=None, doc=f"peak learning rate; {SL_RATES.doc}", validator=positive_or_none
    )


@chz.chz(typecheck=True)
class ExistingFolderKey(FieldGroup):
    """How to handle an existing folder."""

    behavior_if_log_dir_exists: LogdirBehavior = chz.field(default="ask", doc="ask, resume, delete or raise")


@chz.chz(typecheck=True)
class RunName(FieldGroup):
    """An addition to the folder's name."""

    name: str | None = chz.field(default=None, doc="added to the default folder's name")


@chz.chz(typecheck=True)
class FolderKeys(OptionalRunFolder, ExistingFolderKey):
    """The run's folder."""


@chz.chz(typecheck=True)
class CommonConfig(DefaultModel, RateKey, RunName, FolderKeys, RunOptions):
    """Keys of every training recipe.

    A recipe changes defaults in its class statement: `class CLIConfig(RLConfig, max_steps=16)`. `rates` is its default
    learning rate by model.
    """

    SHARED_KEYS = (
        "model_name", "backend", "base_url", "renderer_name", "lora_rank", "learning_rate", "max_tokens", "temperature",
        "seed", "max_steps", "log_path", "name", "behavior_if_log_dir_exists", "load_checkpoint_path", "eval_every",
        "save_every", "wandb_project", "wandb_name",
    )  # fmt: skip
    RATES = SL_RATES

    def __init_subclass__(cls, rates: Rates | None = None, **defaults: Any) -> None:
        super().__init_subclass__(**defaults)
        if rates is not None:
            cls.RATES = rates
            override(cls, "learning_rate", doc=f"peak learning rate; {rates.doc}")

    def fill(self, config_cls: type[T], **given: Any) -> T:
        """A library config from the keys of the same names, overridden by `given`, the recipe's own settings."""
        return fields.fill(config_cls, self, **given)

    @property
    def is_tiny(self) -> bool:
        """Whether the model is of the shipped tiny kind, in any folder."""
        return is_tiny(self.model_name)


@chz.chz(typecheck=True)
class ReplyLength(FieldGroup):
    """How long replies may be."""

    max_tokens: int | None = chz.field(
        default=None,
        doc=f"longest completion of one turn; default: {TINY_MAX_TOKENS} for tiny models and each {TINY_CONTEXT} tokens of their "
        f"context, {MAX_TOKENS} for others",
        validator=positive_or_none,
    )


@chz.chz(typecheck=True)
class StepKeys(ReplyLength):
    """Keys of the recipes that sample a given number of batches."""

    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class GroupKeys(GroupSizes):
    """Size of a batch."""


def resolve_model(config: CommonConfig) -> tuple[str, str]:
    """(model, renderer name) of a config, checked together with the backend before anything is loaded."""
    model = shipped_model(config.model_name)
    backends.check_backend(config.backend, model, config.base_url)
    renderer_name = full_reference(config.renderer_name or model_info.get_recommended_renderer_name(model))
    if config.renderer_name is not None:
        model_info.warn_if_renderer_not_recommended(model, renderer_name)
    get_renderer_of_model(renderer_name, model)  # an incompatible renderer fails here
    return model, renderer_name


def for_model(cli: C) -> C:
    """The keys with the model's path and renderer, checked, and with the model's defaults of learning_rate and, for a
    recipe with that key, max_tokens.

    Raises ConfigurationError for an unavailable model, backend or renderer; nothing is loaded.
    """
    model, renderer_name = resolve_model(cli)
    chosen: dict[str, Any] = {"learning_rate": cli.learning_rate or cli.RATES.of(model)}
    if "max_tokens" in chz.chz_fields(cli):
        chosen["max_tokens"] = getattr(cli, "max_tokens") or max_tokens_for(model)  # noqa: B009 (a key of some)
    return chz.replace(cli, model_name=model, renderer_name=renderer_name, **chosen)


def prompt_room(cli: CommonConfig) -> int | None:
    """The longest prompt that leaves room for max_tokens in the model's context; None when its context length is
    unknown.
    """
    context, longest = model_info.get_context_length(cli.model_name), getattr(cli, "max_tokens", None)
    if context is None or longest is None:
        return None
    if longest >= context:
        raise ConfigurationError(
            f"max_tokens={longest} leaves no room for a prompt in the context of {context}; lower max_tokens"
        )
    return context - longest


def run_config(
    cli: CommonConfig,
    config_cls: type[R],
    check: Callable[[R], Any],
    recipe: str,
    folder: Sequence[str],
    **given: Any,
) -> R:
    """A loop's config from resolved keys and `given`, checked; the run's folder (named after `folder`) is opened last."""
    name = cli.session_name or default_cookbook_session_name(recipe, cli.name, wandb_name=cli.wandb_name)
    config = cli.fill(config_cls, **({"recipe_name": recipe, "log_path": "", "session_name": name} | given))
    check(config)
    return chz.replace(config, log_path=open_log_path(cli, recipe, *folder))


def open_log_path(config: CommonConfig, recipe: str, *parts: str) -> str:
    """The run's folder: `log_path`, after asking what to do if it exists, else a new one named after time and `parts`."""
    if config.log_path is not None:
        check_log_dir(config.log_path, config.behavior_if_log_dir_exists)
        note_log_path(config.log_path)
        return config.log_path
    root = variables.read("TINKER_DEBATE_LOG_ROOT") or Path(default_log_path(recipe, "run")).parent
    words = [time.strftime("%Y%m%d_%H%M%S"), *parts, *([config.name] if config.name else [])]
    folder = re.sub(r"[^A-Za-z0-9_.\-]+", "-", "_".join(words))
    unique, n = Path(root) / folder, 2
    while True:
        try:
            unique.mkdir(parents=True)  # now: two runs started in the same second must not share a folder
            break
        except FileExistsError:
            unique, n = Path(root) / f"{folder}_{n}", n + 1
    note_log_path(unique)
    return str(unique)


def dataset_label(dataset: str | Callable[..., Any] | None, default: str) -> str:
    """A dataset's name in a folder name: shipped and hub names unchanged, files and functions as `custom`."""
    name = dataset or default
    if not isinstance(name, str) or is_reference(name):
        return "custom"
    return "custom" if is_data_file(name) or (os.sep in name and Path(name).exists()) else name
