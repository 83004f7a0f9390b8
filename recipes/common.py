"""What the recipes share: the keys that all of them take, the shipped model's name, and where a run's files go."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import chz

from tinker_cookbook import backends, model_info
from tinker_cookbook.cli_utils import LogdirBehavior, check_log_dir
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tasks.datasets import EXAMPLE_DATA

TINY_CHAT = "tiny_chat"


@chz.chz(typecheck=True)
class CommonConfig:
    """Keys of every training recipe."""

    model_name: str = chz.field(
        default=TINY_CHAT, doc="tiny_chat (shipped), a model directory, or a hub id such as Qwen/Qwen3-4B-Instruct-2507"
    )
    backend: str | None = chz.field(default=None, doc="local, or tinker (hosted); default: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="with backend=tinker: another server that speaks the protocol")
    renderer_name: str | None = chz.field(default=None, doc="how messages become tokens; default: the model's own")
    lora_rank: int = chz.field(default=32, doc="rank of the LoRA adapter", validator=chz.validators.gt(0))
    learning_rate: float = chz.field(default=1e-4, doc="Adam's learning rate", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of everything random; same seed, same metrics on the same machine")
    max_steps: int | None = chz.field(default=None, doc="number of optimizer steps (batches)")
    log_path: str | None = chz.field(
        default=None, doc="folder of the run; default: a new one under TINKER_DEBATE_LOG_ROOT or <tmp>/tinker-examples"
    )
    name: str | None = chz.field(default=None, doc="added to the default folder's name")
    behavior_if_log_dir_exists: LogdirBehavior = chz.field(default="ask", doc="ask, resume, delete or raise")
    load_checkpoint_path: str | None = chz.field(default=None, doc="start from these weights (tinker://...)")
    eval_every: int = chz.field(
        default=20, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )
    save_every: int = chz.field(
        default=20, doc="checkpoint every n steps; 0: only at the end", validator=chz.validators.ge(0)
    )
    wandb_project: str | None = chz.field(default=None, doc="log to this Weights & Biases project (extra: wandb)")
    wandb_name: str | None = chz.field(default=None, doc="name of the W&B run")


@chz.chz(typecheck=True)
class SamplingKeys:
    """Keys of every recipe that samples."""

    max_tokens: int = chz.field(default=64, doc="longest completion of one turn", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=1.0, doc="sampling temperature", validator=chz.validators.gt(0))


def resolve_model(config: CommonConfig) -> tuple[str, str]:
    """(model, renderer name) of a config, checked together with the backend before anything is loaded."""
    model = str(EXAMPLE_DATA / TINY_CHAT) if config.model_name == TINY_CHAT else config.model_name
    backends.check_backend(config.backend, model, config.base_url)
    return model, config.renderer_name or model_info.get_recommended_renderer_name(model)


def open_log_path(config: CommonConfig, recipe: str, *parts: str) -> str:
    """The run's folder: `log_path` after asking what to do when it exists, else a new one named after time and `parts`."""
    if config.log_path is not None:
        check_log_dir(config.log_path, config.behavior_if_log_dir_exists)
        return config.log_path
    root = os.environ.get("TINKER_DEBATE_LOG_ROOT") or Path(tempfile.gettempdir()) / "tinker-examples" / recipe
    words = [time.strftime("%Y%m%d_%H%M%S"), *parts, *([config.name] if config.name else [])]
    folder = re.sub(r"[^A-Za-z0-9_.\-]+", "-", "_".join(words))
    unique, n = Path(root) / folder, 2
    while unique.exists():
        unique, n = Path(root) / f"{folder}_{n}", n + 1
    return str(unique)


def dataset_label(dataset: str | None, default: str) -> str:
    """How a dataset is called in a folder's name: shipped and hub names as they are, files as `custom`."""
    name = dataset or default
    return "custom" if name.endswith(".jsonl") or (os.sep in name and Path(name).exists()) else name


def loss_config(config: CommonConfig, temperature: float) -> dict[str, float] | None:
    """Score at the temperature that was sampled at, which the local engine can do; elsewhere the loop explains."""
    if temperature != 1.0 and backends.resolve_backend(config.backend) == "local":
        return {"temperature": temperature}
    return None


def check_groups(num_rollouts: int, num_groups: int, multiple: int) -> int:
    """Rollouts per group. Raises ConfigurationError unless they divide, into a multiple of `multiple` (2 for debates)."""
    group_size, rest = divmod(num_rollouts, num_groups)
    fitting = num_groups * multiple * max(1, -(-group_size // multiple))
    if rest:
        raise ConfigurationError(
            f"num_rollouts={num_rollouts} is not divisible by num_groups={num_groups}; try num_rollouts={fitting}"
        )
    if group_size % multiple:
        raise ConfigurationError(
            f"num_rollouts / num_groups = {group_size} is odd, but a debate takes two rollouts; try num_rollouts={fitting}"
        )
    return group_size
