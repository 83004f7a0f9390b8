"""Shared keys of the recipes that use finished weights; the default is the shipped model."""

import chz

from recipes.common import MAX_TOKENS, TINY_CHAT, TINY_MAX_TOKENS, default_model
from tinker_cookbook.data.shipped import is_tiny
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import last_sampler_path
from tinker_cookbook.utils.fields import Defaults, fill
from tinker_cookbook.weights_config import Policy, WeightsConfig


@chz.chz(typecheck=True)
class CheckpointKeys(Defaults):
    """Which checkpoint, and where it is."""

    model_path: str | None = chz.field(default=None, doc="a checkpoint (tinker://...)")
    log_path: str | None = chz.field(default=None, doc="folder of a run, whose last checkpoint is taken")
    backend: str | None = chz.field(default=None, doc="local, or tinker (hosted); default: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="with backend=tinker: another server that speaks the protocol")


@chz.chz(typecheck=True)
class ReplyKeys(Defaults):
    """How replies are sampled."""

    renderer_name: str | None = chz.field(
        default=None, doc="how messages become tokens; default: as the checkpoint was trained, else the model's own"
    )
    max_tokens: int | None = chz.field(
        default=None, doc=f"longest reply; default: {TINY_MAX_TOKENS} for a tiny model, else {MAX_TOKENS}"
    )
    temperature: float = chz.field(default=1.0, doc="sampling temperature; 0 is greedy", validator=chz.validators.ge(0))
    seed: int | None = chz.field(default=None, doc="seed of sampling; None samples afresh")


@chz.chz(typecheck=True)
class PolicyCLIConfig(CheckpointKeys, ReplyKeys):
    """Keys of the recipes that sample from finished weights. At most one of model_path, log_path, model_name may be
    set.
    """

    model_name: str | None = chz.field(
        default=None, doc=f"a base model: a directory or a hub id; default: TINKER_DEBATE_BASE_MODEL, else {TINY_CHAT}"
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
    if cli.max_tokens is not None:
        return cli.max_tokens
    return TINY_MAX_TOKENS if is_tiny(base_model) else MAX_TOKENS
