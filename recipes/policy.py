"""What the recipes share that take finished weights: the shipped model is what they talk to unless told otherwise."""

import chz

from recipes.common import MAX_TOKENS, TINY_CHAT, TINY_MAX_TOKENS
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.policies import PolicyConfig


@chz.chz(typecheck=True)
class PolicyCLIConfig(PolicyConfig):
    """Keys of the recipes that take finished weights."""

    max_tokens: int | None = chz.field(
        default=None, doc=f"longest reply; default: {TINY_MAX_TOKENS} for the shipped model, else {MAX_TOKENS}"
    )


def policy_config(cli: PolicyCLIConfig) -> PolicyConfig:
    """The weights that the keys name; tiny_chat, or none named, is the shipped model."""
    model_name = cli.model_name
    if model_name == TINY_CHAT or (model_name is None and cli.model_path is None and cli.log_path is None):
        model_name = str(EXAMPLE_DATA / TINY_CHAT)
    return PolicyConfig(
        model_path=cli.model_path,
        log_path=cli.log_path,
        model_name=model_name,
        renderer_name=cli.renderer_name,
        backend=cli.backend,
        base_url=cli.base_url,
    )


def reply_tokens(cli: PolicyCLIConfig, base_model: str) -> int:
    """The reply length asked for, else what suits the model."""
    if cli.max_tokens is not None:
        return cli.max_tokens
    return TINY_MAX_TOKENS if base_model == str(EXAMPLE_DATA / TINY_CHAT) else MAX_TOKENS
