"""Metrics of rollouts, and an evaluator that runs a policy on a fixed dataset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.monitors import scan
from tinker_cookbook.rl.rollout_files import StepRollouts
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
from tinker_cookbook.rl.rollouts import ZERO_REWARD_METRIC_KEY, RolloutErrorCounter, do_batch_rollout, finished_groups
from tinker_cookbook.rl.transcripts import evaluation_files
from tinker_cookbook.rl.types import (
    MONITOR_PREFIX,
    PARSE_ERROR_MASKED_METRIC_KEY,
    STOP_METRIC_PREFIX,
    EnvGroupBuilder,
    RLDataset,
    TrajectoryGroup,
)
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.utils.intervals import clustered_mean
from tinker_cookbook.utils.seeds import derive_seed

_OF_EPISODES = (
    ZERO_REWARD_METRIC_KEY,
    "max_tokens_reached",
    "context_overflow",
    "max_turns",
    "max_tool_calls",
    "tool_stopped",
)
_OF_TURNS = ("parse_error", PARSE_ERROR_MASKED_METRIC_KEY)


def compute_trajectory_metrics(
    trajectory_groups_P: Sequence[TrajectoryGroup], taglist_P: Sequence[Sequence[str]] | None = None
) -> dict[str, float]:
    """Metrics over all groups as env/all/..., and over the groups of each tag that not all groups have as env/<tag>/...

    `taglist_P` overrides the groups' tags.
    """
    if taglist_P is None:
        taglist_P = [group.tags for group in trajectory_groups_P]
    metrics = {f"env/all/{key}": value for key, value in _group_metrics(trajectory_groups_P).items()}
    for tag in sorted({tag for tags in taglist_P for tag in tags}):
        selected = [group for group, tags in zip(trajectory_groups_P, taglist_P, strict=True) if tag in tags]
        if len(selected) < len(trajectory_groups_P):
            metrics |= {f"env/{tag}/{key}": value for key, value in _group_metrics(selected).items()}
    return metrics


def _group_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories_G]
    transitions = [transition for trajectory in trajectories for transition in trajectory.transitions]
    if not trajectories:
        return {}
    ac_tokens = sum(len(transition.ac.tokens) for transition in transitions)
    ob_tokens = sum(transition.ob.length for transition in transitions)
    rewards = [reward for group in groups for reward in group.get_total_rewards()]
    metrics: dict[str, float] = {
        "ac_tokens_per_turn": ac_tokens / len(transitions),
        "ob_tokens_per_turn": ob_tokens / len(transitions),
        "turns_per_episode": len(transitions) / len(trajectories),
        "total_episodes": len(trajectories),
        "total_turns": len(transitions),
        "total_ac_tokens": ac_tokens,
        "total_ob_tokens": ob_tokens,
        "total_cached_ob_tokens": sum(transition.ac.prompt_cache_hit_tokens for transition in transitions),
        "reward/total": sum(rewards) / len(rewards),
        "trained_fraction": sum(sum(group.is_trained()) for group in groups) / len(trajectories),
        **_fractions_by_group(groups),
    }
    # A metric is averaged over the members that report it: only correct debaters report won_if_correct, say. Metrics that
    # are only reported when something happened are fractions of all: stop reasons of episodes, parse errors of turns.
    reported: defaultdict[str, list[float]] = defaultdict(list)
    by_group: defaultdict[str, list[list[float]]] = defaultdict(list)
    for group in groups:
        for key in group.rate_ranges:
            by_group[key].append([])
        for trajectory, group_metrics in zip(group.trajectories_G, group.metrics_G, strict=True):
            for source in [*(transition.metrics for transition in trajectory.transitions), group_metrics]:
                for key, value in source.items():
                    reported[key].append(value)
                    if key in group.rate_ranges:
                        by_group[key][-1].append(value)
    ranges = {key: bounds for group in groups for key, bounds in group.rate_ranges.items()}
    for key, (low, high) in ranges.items():
        if key in reported:
            interval = clustered_mean(by_group[key], low, high)
            metrics |= {f"{key}_low": interval.low, f"{key}_high": interval.high}
    flagged = [key for key in reported if key.startswith(MONITOR_PREFIX) and key.count("/") == 1]
    metrics |= {f"{key}_count": sum(reported[key]) for key in sorted(flagged)}
    shares = dict.fromkeys(_OF_EPISODES, len(trajectories)) | dict.fromkeys(_OF_TURNS, len(transitions))
    shares |= dict.fromkeys((key for key in reported if key.startswith(STOP_METRIC_PREFIX)), len(trajectories))
    return metrics | {key: sum(values) / shares.get(key, len(values)) for key, values in sorted(reported.items())}


def _fractions_by_group(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Fractions of groups whose trained members differ in reward (mixed: they give signal), or all do well or all
    badly.
    """
    kinds: Counter[str] = Counter()
    for rewards in (group.trained_rewards() for group in groups):
        if rewards:
            kinds["mixed" if len(set(rewards)) > 1 else "all_good" if rewards[0] > 0.5 else "all_bad"] += 1
    return {f"by_group/frac_{kind}": kinds[kind] / len(groups) for kind in ("mixed", "all_good", "all_bad")}


def dataset_to_env_group_builders(dataset: RLDataset) -> list[EnvGroupBuilder]:
    """All groups of a dataset in order."""
    return [builder for index in range(len(dataset)) for builder in dataset.get_batch(index)]


class RLTestSetEvaluator(SamplingClientEvaluator):
    """Runs the policy once on every group of a dataset; metrics are named <name>/env/all/...

    Args:
        num_groups_to_log: write transcripts of this many first groups, to the folder of the training run
            (`rl.transcripts`).
        strategy: overrides the strategy of `config`; failed groups are counted and left out.
        seed: each evaluation draws the same random numbers, so that a change in the metrics is a change in the policy.
        config: how each rollout is run, as in training.
    """

    def __init__(
        self,
        dataset: RLDataset,
        max_tokens: int,
        name: str = "test",
        num_groups_to_log: int = 4,
        strategy: RolloutStrategy | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        config: RolloutConfig | None = None,
    ):
        self._builders = dataset_to_env_group_builders(dataset)
        self.name, self._num_groups_to_log = name, num_groups_to_log
        self._config = (config or RolloutConfig()).with_strategy(strategy)
        self._make_policy = partial(
            TinkerTokenCompleter,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )

    @classmethod
    def of_config(cls, config: Config, dataset: RLDataset) -> RLTestSetEvaluator:
        """The test set of a run, sampled with the settings of its training."""
        return cls(
            dataset,
            config.max_tokens,
            num_groups_to_log=config.num_groups_shown,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=derive_seed(config.seed, "test"),
            config=config.effective_rollout(),
        )

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        files = evaluation_files()
        num_shown = self._num_groups_to_log if files is not None else 0
        outcomes = await do_batch_rollout(self._builders, self._make_policy(sampling_client), self._config, num_shown)
        if files is not None:
            rollouts = StepRollouts(outcomes, [None] * len(outcomes))
            files.write(self.name, rollouts, num_shown, sampling_client.get_tokenizer())
        for group in finished_groups(outcomes):
            await scan(group, sampling_client.get_tokenizer)
        errors = RolloutErrorCounter()
        for outcome in outcomes:
            errors.ingest(outcome)
        metrics = compute_trajectory_metrics(finished_groups(outcomes)) | errors.get_metrics()
        return {f"{self.name}/{key}": value for key, value in metrics.items()}
