"""Shared keys of the recipes that use finished weights; the default is the shipped model."""

import chz

from recipes.common import TINY_CHAT, ReplyLength, default_model, max_tokens_for
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import (
    CheckpointKey,
    OptionalModelKey,
    OptionalRunFolder,
    RendererKey,
    SamplingSeed,
    ServiceKeys,
    Temperature,
)
from tinker_cookbook.runs.checkpoints import last_sampler_path
from tinker_cookbook.utils.fields import docs, fill
from tinker_cookbook.weights_config import Policy, WeightsConfig


@chz.chz(typecheck=True)
class CheckpointKeys(OptionalRunFolder, CheckpointKey, ServiceKeys):
    """A checkpoint and its location."""

    DOCS = docs(model_path="a checkpoint (tinker://...)", log_path="folder of a run, whose last checkpoint is used")


@chz.chz(typecheck=True)
class ReplyKeys(RendererKey, ReplyLength, Temperature, SamplingSeed, seed=None):
    """How replies are sampled."""


@chz.chz(typecheck=True)
class PolicyCLIConfig(OptionalModelKey, CheckpointKeys, ReplyKeys):
    """Keys of the recipes that sample from finished weights. At most one of model_path, log_path, model_name may be
    set.
    """

    DOCS = docs(
        model_name=f"a base model: a directory or a hub id; default: TINKER_DEBATE_BASE_MODEL, else {TINY_CHAT}"
    )


async def open_policy(cli: PolicyCLIConfig) -> Policy:
    """The weights that the keys name; tiny_chat, or no name, means the shipped model.

    Raises ConfigurationError when several are named, and the errors of `WeightsConfig.open_policy`.
    """
    named = [key for key in ("model_path", "log_path", "model_name") if getattr(cli, key) is not None]
    if len(named) > 1:
        raise ConfigurationError(
            f"{', '.join(named)} are given: give one of model_path=tinker://..., log_path=<run>, model_name=..."
        )
    base_model, path = cli.model_name, cli.model_path
    if cli.log_path is not None:
        path = last_sampler_path(cli.log_path)
    if not named:
        base_model = default_model()
    weights = fill(WeightsConfig, cli, base_model=base_model, load_checkpoint_path=path)
    return await weights.open_policy(named[0] if named else "model_name")


def reply_tokens(cli: PolicyCLIConfig, base_model: str) -> int:
    """The requested reply length, else the default of the model."""
    return max_tokens_for(base_model) if cli.max_tokens is None else cli.max_tokens
