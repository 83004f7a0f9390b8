"""What the recipes for reinforcement learning share: their keys, and the training loop's config made of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, cast

import chz

from recipes.common import (
    MAX_TOKENS,
    RL_LEARNING_RATE,
    RL_SHARE,
    TINY_LEARNING_RATE,
    TINY_MAX_TOKENS,
    CommonConfig,
    by_model,
    dataset_label,
    default_model,
    prompt_room,
    run_config,
)
from tinker_cookbook import backends, config_tree
from tinker_cookbook.config_tree import with_default
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.env.dataset import DatasetBuilder, Environment
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.algorithms import LOSS_FNS, PRESETS, STABLE_REINFORCE, get_preset
from tinker_cookbook.rl.config import RLOptions
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.runs.evaluation import SamplingClientEvaluatorBuilder
from tinker_cookbook.runs.outcome import RunSummary, print_rl_changes
from tinker_cookbook.tasks.lm_grader import GraderConfig
from tinker_cookbook.tasks.registry import get_task, known_tasks, shipped_datasets
from tinker_cookbook.tasks.rewards import REWARDS
from tinker_cookbook.tasks.single_turn import TaskEvaluatorBuilder

logger = logging.getLogger(__name__)

_RETRY = "rollout_error_tolerance"
LOSS_AHEAD_LOCAL = "ppo"
"""Of a run on the local engine that samples ahead."""


def preset_keys(name: str) -> dict[str, Any]:
    """What a preset stands for, as keyword arguments of a recipe's CLIConfig. Raises ConfigurationError for an unknown name."""
    preset = get_preset(name)
    return {
        "advantage": preset.advantage,
        "loss_fn": preset.loss_fn,
        "loss_fn_config": dict(preset.loss_fn_config) if preset.loss_fn_config else None,
        "remove_constant_reward_groups": preset.remove_constant_reward_groups,
    }


def _known_preset(owner: Any, attribute: str) -> None:
    if (name := getattr(owner, attribute)) is not None:
        get_preset(name)


def _by_preset(key: str) -> Any:
    """A field of RLOptions that is what the preset says unless it is given: on the command line and from Python alike."""
    field = chz.chz_fields(RLOptions)[key]
    default = config_tree.default_of(field)

    def settled(config: "RLConfig", given: Any) -> Any:
        if given is not None:
            return given
        return default if config.preset is None else preset_keys(config.preset)[key]

    doc = f"{field._doc}; default: the preset's, else {default}"
    return chz.field(default=None, x_type=cast(Any, Optional[field.x_type]), munger=settled, doc=doc)  # noqa: UP045


def _loss(config: "RLConfig", given: str | None) -> str | Callable[..., Any]:
    """The loss of a run whose key is not given: what the preset says, else one that fits how far the run samples ahead."""
    ahead = config.async_config
    if given is not None:
        return given
    if config.preset is not None:
        return get_preset(config.preset).loss_fn
    if ahead is not None and ahead.loss_fn != STABLE_REINFORCE:
        return ahead.loss_fn
    if ahead is None or ahead.max_steps_off_policy == 0:
        return config_tree.default_of(chz.chz_fields(RLOptions)["loss_fn"])
    return LOSS_AHEAD_LOCAL if backends.resolve_backend(config.backend) == "local" else STABLE_REINFORCE


def _loss_settings(config: "RLConfig", given: dict[str, float] | None) -> dict[str, float] | None:
    if given is not None or config.preset is None or config.loss_fn != get_preset(config.preset).loss_fn:
        return given  # the settings of one loss are nothing that another loss takes over
    return preset_keys(config.preset)["loss_fn_config"]


def _advantages(config: "RLConfig", given: AdvantageConfig) -> AdvantageConfig:
    is_default = given is config_tree.default_of(chz.chz_fields(config)["advantage"])
    return get_preset(config.preset).advantage if is_default and config.preset is not None else given


_ADVANTAGE = AdvantageConfig()


@chz.chz(typecheck=True)
class RLConfig(CommonConfig, RLOptions):
    """Keys of every reinforcement learning recipe."""

    MOVED_KEYS = {  # noqa: RUF012 (chz takes no annotation that is not a field's)
        "baseline": "advantage.baseline",
        "advantage_scale": "advantage.scale",
        "clip_low": "loss_fn_config.clip_low_threshold",
        "clip_high": "loss_fn_config.clip_high_threshold",
        "kl_reference_path": "kl_reference_config.load_checkpoint_path",
        "off_policy_cap": "off_policy_correction.cap",
        "max_steps_off_policy": "async_config.max_steps_off_policy",
        "stream_minibatches": "stream_minibatch_config.num_minibatches",
        "rollout_retries": "rollout.retries",
        "rollout_timeout": f"{_RETRY}.per_rollout_timeout, with {_RETRY}=RetryOnFailure",
    }

    preset: str | None = chz.field(
        default=None,
        doc=f"{', '.join(PRESETS)}: loss, clip, advantages and filter of a published algorithm; keys that are given count more",
        validator=_known_preset,
    )
    loss_fn: str = chz.field(
        default=None,
        x_type=cast(Any, Optional[str]),  # noqa: UP045
        munger=_loss,
        doc=f"{', '.join(LOSS_FNS)}, or your own; default: the preset's, else importance_sampling; sampling ahead "
        f"{LOSS_AHEAD_LOCAL} on the local engine and {STABLE_REINFORCE} on the hosted service",
    )
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None, munger=_loss_settings, doc=chz.chz_fields(RLOptions)["loss_fn_config"]._doc
    )
    advantage: AdvantageConfig = chz.field(
        default_factory=lambda: _ADVANTAGE, munger=_advantages, doc=chz.chz_fields(RLOptions)["advantage"]._doc
    )
    remove_constant_reward_groups: bool = _by_preset("remove_constant_reward_groups")
    learning_rate: float | None = by_model("Adam's learning rate", TINY_LEARNING_RATE, RL_LEARNING_RATE, RL_SHARE)
    max_tokens: int | None = by_model("longest completion of one turn", TINY_MAX_TOKENS, MAX_TOKENS)
    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))
    eval_every: int = with_default(RLOptions, "eval_every", 10)

    @classmethod
    def layer(cls, given: Mapping[str, str]) -> dict[str, Any]:
        """Values that follow from the keys given on the command line, and stand below them."""
        values: dict[str, Any] = {}
        if (loss := given.get("async_config.loss_fn")) is not None:
            if given.get("loss_fn", loss) != loss:
                raise ConfigurationError(
                    f"loss_fn={given['loss_fn']} and async_config.loss_fn={loss} differ; give loss_fn alone"
                )
            values["loss_fn"] = loss
        if (name := given.get("preset", "None")) != "None":
            values |= _preset_layer(name, {**values, **given})
        reference = "kl_reference_config"
        if f"{reference}.load_checkpoint_path" in given and f"{reference}.base_model" not in given:
            model = given.get("model_name") or default_model()
            values[f"{reference}.base_model"] = shipped_model(model)
        return values


def _preset_layer(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Those of its values that may be given in part."""
    preset, keys = get_preset(name), dict[str, Any]()
    advantage, settings = preset.advantage, preset.loss_fn_config or {}
    if given.get("loss_fn", preset.loss_fn) != preset.loss_fn:
        settings = {}  # the settings of another loss
    for key, value in chz.asdict(advantage).items():
        keys[f"advantage.{key}"] = value
    for key, value in settings.items():
        keys[f"loss_fn_config.{key}"] = value
    return {key: value for key, value in keys.items() if not {key, key.partition(".")[0]} & given.keys()}


_SHIPPED = "; ".join(f"{task}: {', '.join(datasets)}" for task, datasets in shipped_datasets().items())


@chz.chz(typecheck=True)
class TaskConfig(RLConfig):
    """Keys of the recipes that take a task."""

    task: str | Callable[..., Any] = chz.field(
        default="qa", doc=f"{', '.join(known_tasks())}; or your own: package.module:object, path/file.py:object"
    )
    dataset: str | Callable[..., Any] | None = chz.field(
        default=None,
        doc=f"shipped name ({_SHIPPED}), a .jsonl/.csv/.parquet file, a hub dataset id, or your own "
        "(path/file.py:function)",
    )
    test_dataset: str | None = chz.field(default=None, doc="held-out items, if the dataset has no test split")
    reward_fn: str | Callable[..., Any] | None = chz.field(
        default=None,
        doc=f"{', '.join(REWARDS)}, your own (path/file.py:function), or a mixture such as compression:0.5,rouge:0.3; "
        "default: the task's own",
    )
    num_rollouts: int = chz.field(default=64, doc="rollouts per batch", validator=chz.validators.gt(0))
    num_groups: int = chz.field(default=8, doc="questions per batch", validator=chz.validators.gt(0))
    max_eval_items: int = chz.field(default=100, doc="questions per evaluation", validator=chz.validators.gt(0))
    eval_grader: GraderConfig = chz.field(
        default_factory=GraderConfig,
        doc="an endpoint that grades replies to held-out questions at each evaluation (graded/); the reward stays what it is",
    )


def dataset_of(cli: RLConfig, env: Environment, **own: Any) -> DatasetBuilder:
    """The batches of an environment from settled keys, checked; `own` are other fields of DatasetBuilder."""
    own = {"num_batches": cli.max_steps, "max_prompt_tokens": prompt_room(cli)} | own
    builder = cli.fill(DatasetBuilder, env=env, **own)
    builder.check()
    return builder


def questions_of(cli: TaskConfig, env: Environment, group_size: int) -> DatasetBuilder:
    """The same for an environment of a task's questions."""
    return dataset_of(cli, env, groups_per_batch=cli.num_groups, group_size=group_size, num_test=cli.max_eval_items)


def train_config(
    cli: RLConfig,
    recipe: str,
    dataset_builder: RLDatasetBuilder,
    folder: Sequence[str],
    evaluator_builders: Sequence[SamplingClientEvaluatorBuilder] = (),
) -> train.Config:
    """The training loop's config from a recipe's settled keys, checked; the run's folder (named after `folder`) comes last."""
    evaluators = [*cli.evaluator_builders, *evaluator_builders]
    own: dict[str, Any] = {"dataset_builder": dataset_builder, "evaluator_builders": evaluators}
    if cli.async_config is not None:
        own["async_config"] = chz.replace(cli.async_config, loss_fn=cli.loss_fn)
        if cli.async_config.max_steps_off_policy > 0 and cli.loss_fn == LOSS_AHEAD_LOCAL:
            logger.warning(
                "sampling %d batches ahead with loss_fn=%s, the default of the local engine; loss_fn=%s is its own loss for such "
                "samples",
                cli.async_config.max_steps_off_policy,
                cli.loss_fn,
                STABLE_REINFORCE,
            )
    # The local trainer can score at the temperature that was sampled at; where it cannot, check_config explains.
    if cli.temperature != 1.0 and cli.loss_fn in LOSS_FNS and backends.resolve_backend(cli.backend) == "local":
        own["loss_fn_config"] = {"temperature": cli.temperature} | (cli.loss_fn_config or {})
    return run_config(cli, train.Config, train.check_config, recipe, folder, **own)


async def train_and_show(config: train.Config, metrics: Sequence[str]) -> RunSummary:
    """The run, and then how these metrics moved."""
    summary = await train.main(config)
    print_rl_changes(config.log_path, metrics)
    return summary


def train_questions_evaluator(cli: TaskConfig, extra_request: str = "") -> TaskEvaluatorBuilder:
    """Single-turn replies to a fixed choice of the training questions, to set beside the held-out ones."""
    return cli.fill(
        TaskEvaluatorBuilder,
        name="train_questions",
        extra_request=extra_request,
        max_items=cli.max_eval_items,
        max_prompt_tokens=prompt_room(cli),
        rollout=cli.effective_rollout(),
    )


def graded_evaluators(cli: TaskConfig, extra_request: str = "") -> list[TaskEvaluatorBuilder]:
    """One whose rewards are the grades of `eval_grader`; none where no endpoint is named. Raises ConfigurationError."""
    grader = cli.eval_grader.open("eval_grader")
    if grader is None:
        return []
    held_out = {"split": "test"} if cli.test_dataset is None else {"dataset": cli.test_dataset, "split": "train"}
    builder = cli.fill(
        TaskEvaluatorBuilder,
        name="graded",
        reward_fn=grader,
        extra_request=extra_request,
        max_items=cli.max_eval_items,
        max_prompt_tokens=prompt_room(cli),
        rollout=cli.effective_rollout(),
        **held_out,
    )
    return [builder]


def run_folder(cli: TaskConfig, mode: str) -> list[str]:
    """The words that name a run's folder: n<rollouts> g<groups> <mode> <task> <dataset>."""
    task = get_task(cli.task, cli.reward_fn)
    label = dataset_label(cli.dataset, task.default_dataset)
    return [f"n{cli.num_rollouts}", f"g{cli.num_groups}", mode, task.name, label]


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
