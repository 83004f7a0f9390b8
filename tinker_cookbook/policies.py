"""From a name to a policy that can be sampled from: a checkpoint, a run's last checkpoint, or a base model.

What talks to finished weights (chat, benchmarks, inspect) opens them here, with the renderer that they were trained with.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import chz

from tinker_cookbook import backends, model_info
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.renderer_metadata import RENDERER_NAME_METADATA_KEY
from tinker_cookbook.tokenizer_utils import get_tokenizer

logger = logging.getLogger(__name__)


@chz.chz(typecheck=True)
class PolicyConfig:
    """Which weights, where they run, and how messages become tokens. Of the first three, one is given."""

    model_path: str | None = chz.field(default=None, doc="a checkpoint to sample from (tinker://...)")
    log_path: str | None = chz.field(default=None, doc="folder of a run, whose last checkpoint is taken")
    model_name: str | None = chz.field(default=None, doc="a base model: a directory or a hub id")
    renderer_name: str | None = chz.field(
        default=None, doc="how messages become tokens; default: as the checkpoint was trained, else the model's own"
    )
    backend: str | None = chz.field(default=None, doc="local, or tinker (hosted); default: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="with backend=tinker: another server that speaks the protocol")


@dataclass(frozen=True)
class Policy:
    """Weights that can be sampled from, and what is needed to talk to them."""

    name: str
    """the checkpoint's path, or the base model"""
    sampling_client: SamplingClient
    renderer: Renderer
    renderer_name: str
    base_model: str
    context_length: int | None


def checkpoint_path(config: PolicyConfig) -> str | None:
    """The checkpoint that a config names, or None for a base model; nothing is loaded.

    Raises:
        ConfigurationError: not exactly one of model_path, log_path and model_name is given, or the run in log_path has
            saved no weights to sample from.
    """
    named = [key for key in ("model_path", "log_path", "model_name") if getattr(config, key) is not None]
    if len(named) != 1:
        raise ConfigurationError(
            f"{', '.join(named) or 'no weights'} given: give one of model_path=tinker://..., log_path=<run>, model_name=..."
        )
    if config.model_path is not None:
        if not config.model_path.startswith("tinker://"):
            raise ConfigurationError(
                f"model_path={config.model_path!r}: is no checkpoint path (tinker://...); "
                "a run's folder goes into log_path, a base model into model_name"
            )
        return config.model_path
    if config.log_path is None:
        return None
    return last_sampler_path(config.log_path)


def last_sampler_path(log_path: str | Path) -> str:
    """The newest weights of a run that can be sampled from. Raises ConfigurationError when there are none."""
    if not Path(log_path).expanduser().is_dir():
        raise ConfigurationError(f"log_path={str(log_path)!r}: no such folder")
    record = get_last_checkpoint(log_path, required_key="sampler_path")
    if record is None or record.sampler_path is None:
        raise ConfigurationError(
            f"log_path={str(log_path)!r}: the run has no checkpoint to sample from; runs save one at the end, and "
            "every save_every steps"
        )
    return record.sampler_path


async def open_policy(config: PolicyConfig) -> Policy:
    """Load what a config names.

    Raises:
        ConfigurationError: as `checkpoint_path`; or backend, model or renderer are unknown.
    """
    path = checkpoint_path(config)
    if config.model_name is not None:
        backends.check_backend(config.backend, config.model_name, config.base_url)
    service = backends.create_service_client(config.backend, config.base_url)
    recorded = None
    if path is None:
        base_model = str(config.model_name)
    else:
        training_run = await service.create_rest_client().get_training_run_by_tinker_path_async(path)
        base_model = training_run.base_model
        recorded = (training_run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
    renderer_name = config.renderer_name or recorded or model_info.get_recommended_renderer_name(base_model)
    if recorded not in (None, renderer_name):
        logger.warning("renderer_name=%s, but %s was trained with %s", renderer_name, path, recorded)
    renderer = get_renderer(renderer_name, get_tokenizer(base_model), model_name=base_model)
    if path is None:
        client = await service.create_sampling_client(base_model=base_model)
    else:
        client = await service.create_sampling_client(model_path=path)
    context = model_info.get_context_length(base_model)
    return Policy(path or base_model, client, renderer, renderer_name, base_model, context)
