"""What the recipes share: the keys that all of them take, the shipped model's name, and where a run's files go."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from recipes.rl_options import RLOptions, algorithm_settings
from tinker_cookbook import backends, model_info
from tinker_cookbook.cli_utils import LogdirBehavior, check_log_dir, default_log_path
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.eval.evaluators import SamplingClientEvaluatorBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import AdvantageConfig
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.tasks.registry import get_task, known_tasks
from tinker_cookbook.tasks.rewards import REWARDS
from tinker_cookbook.tasks.single_turn import TaskEvaluatorBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.ml_log import TrackerConfig, tracker_settings

TINY_CHAT = "tiny_chat"

TINY_LEARNING_RATE, TINY_MAX_TOKENS = 1e-3, 64
"""What suits the shipped model, and would wreck or cut short a real one."""
RL_LEARNING_RATE, SL_LEARNING_RATE, MAX_TOKENS = 4e-5, 2e-4, 512
"""What suits real models to begin with; rank does not matter, model size and data do."""


@chz.chz(typecheck=True)
class _RunKeys:
    """A base of its own, so that `--help` lists these keys before those of the trackers."""

    model_name: str = chz.field(
        default=TINY_CHAT, doc="tiny_chat (shipped), a model directory, or a hub id such as Qwen/Qwen3-4B-Instruct-2507"
    )
    backend: str | None = chz.field(default=None, doc="local, or tinker (hosted); default: TINKER_BACKEND, else local")
    base_url: str | None = chz.field(default=None, doc="with backend=tinker: another server that speaks the protocol")
    renderer_name: str | None = chz.field(default=None, doc="how messages become tokens; default: the model's own")
    lora_rank: int = chz.field(
        default=32, doc="rank of a new LoRA adapter (a loaded checkpoint keeps its own)", validator=chz.validators.gt(0)
    )
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
    rolling_save_every: int = chz.field(
        default=0,
        doc="save the training state every n steps too, each replacing the one before; 0: never",
        validator=chz.validators.ge(0),
    )


@chz.chz(typecheck=True)
class CommonConfig(TrackerConfig, _RunKeys):
    """Keys of every training recipe."""


@chz.chz(typecheck=True)
class RLConfig(RLOptions, CommonConfig):
    """Keys of every reinforcement learning recipe."""

    learning_rate: float | None = chz.field(
        default=None,
        doc=f"Adam's learning rate; default: {TINY_LEARNING_RATE:g} for tiny_chat, {RL_LEARNING_RATE:g} for other models",
    )
    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))
    eval_every: int = chz.field(
        default=10, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )
    max_tokens: int | None = chz.field(
        default=None, doc=f"longest completion of one turn; default: {TINY_MAX_TOKENS} for tiny_chat, else {MAX_TOKENS}"
    )
    temperature: float = chz.field(default=1.0, doc="sampling temperature", validator=chz.validators.gt(0))
    num_groups_to_log: int = chz.field(
        default=4,
        doc="groups per step and per evaluation to write a readable transcript of; 0: none",
        validator=chz.validators.ge(0),
    )


_SHIPPED = "; ".join(f"{task.name}: {', '.join(task.shipped)}" for task in known_tasks() if task.shipped)


@chz.chz(typecheck=True)
class TaskConfig(RLConfig):
    """Keys of the recipes that take a task."""

    task: str = chz.field(default="qa", doc=" or ".join(task.name for task in known_tasks()))
    dataset: str | None = chz.field(default=None, doc=f"shipped name ({_SHIPPED}), a .jsonl file, or a hub dataset id")
    test_dataset: str | None = chz.field(default=None, doc="held-out items, if the dataset has no test split")
    reward_fn: str | None = chz.field(
        default=None,
        doc=f"{', '.join(REWARDS)}, or a mixture such as compression:0.5,rouge:0.3; default: the task's own",
    )
    num_rollouts: int = chz.field(default=64, doc="rollouts per batch", validator=chz.validators.gt(0))
    num_groups: int = chz.field(default=8, doc="questions per batch", validator=chz.validators.gt(0))
    max_eval_items: int = chz.field(default=100, doc="questions per evaluation", validator=chz.validators.gt(0))


def resolve_model(config: CommonConfig) -> tuple[str, str]:
    """(model, renderer name) of a config, checked together with the backend before anything is loaded."""
    model = str(EXAMPLE_DATA / TINY_CHAT) if config.model_name == TINY_CHAT else config.model_name
    backends.check_backend(config.backend, model, config.base_url)
    renderer_name = config.renderer_name or model_info.get_recommended_renderer_name(model)
    if config.renderer_name is not None:
        model_info.warn_if_renderer_not_recommended(model, renderer_name)
    get_renderer(renderer_name, get_tokenizer(model), model_name=model)  # a renderer that does not fit fails here
    return model, renderer_name


def learning_rate(config: CommonConfig, given: float | None, usual: float) -> float:
    """The learning rate asked for, else what suits the model. Raises ConfigurationError unless it is positive."""
    if given is None:
        return TINY_LEARNING_RATE if config.model_name == TINY_CHAT else usual
    if not 0 < given < float("inf"):
        raise ConfigurationError(f"learning_rate: must be greater than 0, got {given:g}")
    return given


def max_tokens(config: "RLConfig") -> int:
    """The turn length asked for, else what suits the model."""
    return turn_tokens(config, config.max_tokens)


def turn_tokens(config: CommonConfig, given: int | None) -> int:
    """`given`, else what suits the model. Raises ConfigurationError unless it is positive."""
    if given is None:
        return TINY_MAX_TOKENS if config.model_name == TINY_CHAT else MAX_TOKENS
    if given < 1:
        raise ConfigurationError(f"max_tokens={given}: must be at least 1")
    return given


def prompt_room(config: "RLConfig", model: str) -> int | None:
    """Longest prompt that leaves room for a turn in the model's context; None when its context is not known."""
    context = model_info.get_context_length(model)
    if context is None:
        return None
    if max_tokens(config) >= context:
        raise ConfigurationError(
            f"max_tokens={max_tokens(config)} leaves no room for a prompt in the context of {context}; lower max_tokens"
        )
    return context - max_tokens(config)


def open_log_path(config: CommonConfig, recipe: str, *parts: str) -> str:
    """The run's folder: `log_path` after asking what to do when it exists, else a new one named after time and `parts`."""
    if config.log_path is not None:
        check_log_dir(config.log_path, config.behavior_if_log_dir_exists)
        return config.log_path
    root = os.environ.get("TINKER_DEBATE_LOG_ROOT") or Path(default_log_path(recipe, "run")).parent
    words = [time.strftime("%Y%m%d_%H%M%S"), *parts, *([config.name] if config.name else [])]
    folder = re.sub(r"[^A-Za-z0-9_.\-]+", "-", "_".join(words))
    unique, n = Path(root) / folder, 2
    while True:
        try:
            unique.mkdir(parents=True)  # made at once: two runs started in the same second must not share a folder
            break
        except FileExistsError:
            unique, n = Path(root) / f"{folder}_{n}", n + 1
    return str(unique)


def run_settings(cli: CommonConfig, recipe: str, model: str) -> dict[str, Any]:
    """What a recipe's keys say of the run itself, as keyword arguments of a loop's config; log_path is settled last."""
    renderer_name = cli.renderer_name or model_info.get_recommended_renderer_name(model)
    same = (
        "backend", "base_url", "load_checkpoint_path", "lora_rank", "seed", "max_steps", "eval_every", "save_every",
        "rolling_save_every",
    )  # fmt: skip
    named = {"log_path": "", "model_name": model, "recipe_name": recipe, "renderer_name": renderer_name}
    return named | tracker_settings(cli) | {key: getattr(cli, key) for key in same}


def dataset_label(dataset: str | None, default: str) -> str:
    """How a dataset is called in a folder's name: shipped and hub names as they are, files as `custom`."""
    name = dataset or default
    return "custom" if name.endswith(".jsonl") or (os.sep in name and Path(name).exists()) else name


def train_config(
    cli: RLConfig,
    recipe: str,
    model: str,
    dataset_builder: RLDatasetBuilder,
    folder: Sequence[str],
    advantage: AdvantageConfig | None = None,
    evaluator_builders: Sequence[SamplingClientEvaluatorBuilder] = (),
) -> train.Config:
    """The training loop's config from a recipe's keys, checked; the run's folder (named after `folder`) is settled last."""
    # The local trainer can score at the temperature that was sampled at; where it cannot, check_config explains.
    tempered = cli.temperature != 1.0 and backends.resolve_backend(cli.backend) == "local"
    config = train.Config(
        **run_settings(cli, recipe, model),
        **algorithm_settings(cli, model, advantage, cli.temperature if tempered else None),
        learning_rate=learning_rate(cli, cli.learning_rate, RL_LEARNING_RATE),
        dataset_builder=dataset_builder,
        max_tokens=max_tokens(cli),
        temperature=cli.temperature,
        num_groups_to_log=cli.num_groups_to_log,
        evaluator_builders=list(evaluator_builders),
    )
    train.check_config(config)
    return chz.replace(config, log_path=open_log_path(cli, recipe, *folder))


def train_questions_evaluator(
    cli: TaskConfig, model: str, renderer_name: str, extra_request: str = ""
) -> TaskEvaluatorBuilder:
    """Single-turn replies to a fixed choice of the training questions, to set beside the held-out ones."""
    return TaskEvaluatorBuilder(
        name="train_questions",
        task=cli.task,
        dataset=cli.dataset,
        reward_fn=cli.reward_fn,
        model_name=model,
        renderer_name=renderer_name,
        extra_request=extra_request,
        max_items=cli.max_eval_items,
        max_tokens=max_tokens(cli),
        temperature=cli.temperature,
        max_prompt_tokens=prompt_room(cli, model),
        seed=cli.seed,
    )


def run_folder(cli: TaskConfig, mode: str) -> list[str]:
    """The words that name a run's folder: n<rollouts> g<groups> <mode> <task> <dataset>."""
    label = dataset_label(cli.dataset, get_task(cli.task, cli.reward_fn).default_dataset)
    return [f"n{cli.num_rollouts}", f"g{cli.num_groups}", mode, cli.task, label]


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
