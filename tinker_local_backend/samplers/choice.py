"""Choose a model's sampler by TINKER_LOCAL_SAMPLER; no other module does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tinker_local_backend import environment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.memory_plan import SCORING_TOKENS
from tinker_local_backend.engine.models import new_generator
from tinker_local_backend.engine.sampling.sampler import Post, Sampler
from tinker_local_backend.errors import RequestError
from tinker_local_backend.replicas.group import replicas
from tinker_local_backend.replicas.sampler import ReplicaSampler
from tinker_local_backend.samplers.vllm import VllmSampler
from tinker_local_backend.samplers.vllm_server import VllmServer
from tinker_local_backend.samplers.vllm_settings import VllmSettings
from tinker_local_backend.samplers.worker_process import WorkerProcess
from tinker_local_backend.storage.paths import local_home


def make_sampler(model: BaseModel, kv_tokens: int, random_seed: Callable[[], int], post: Post) -> Sampler:
    """A `MakeSampler`. Raises RequestError or ModelLoadError if vLLM is requested but not available."""
    group = replicas()
    if group is not None:
        return ReplicaSampler(model, random_seed, post, group)
    if environment.read("TINKER_LOCAL_SAMPLER") != "vllm":
        return new_generator(model, kv_tokens, random_seed)
    if environment.read("TINKER_LOCAL_EXACT_ROWS") is not None:
        raise RequestError(
            "TINKER_LOCAL_EXACT_ROWS is for the engine's sampler, but TINKER_LOCAL_SAMPLER=vllm: unset one of them"
        )
    if environment.read("TINKER_LOCAL_KV_CACHE_TOKENS") is None:
        kv_tokens = min(kv_tokens, SCORING_TOKENS)  # the rest is for vLLM and training
    generator = new_generator(model, kv_tokens, random_seed)
    settings = VllmSettings.from_environment(model.device)
    if settings.url is None:
        connect = partial(WorkerProcess.start_vllm, model, settings)
        parent = None
    else:
        connect = partial(VllmServer, settings.url, settings.api_key)
        parent = local_home() / "vllm_adapters"  # the server must see it too
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tinker-local-vllm-", dir=parent))
    folder.chmod(0o755)  # a server may run as another user
    return VllmSampler(model, generator, random_seed, post, connect, settings, folder)
