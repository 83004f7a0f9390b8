"""Gradient intuition: predict, together with an answer, how training on this answer would change the policy.

Wraps any environment. Every prompt is the inner prompt plus a probe, which is a question with its answer. The reply
has two parts: PREDICTION, a signed number, and ANSWER, the only part that the inner environment sees. For each answer
a shadow of the policy takes one Adam step on it, after the inner prompt; the truth is the increase of the probe's
logprob, in nats. All members of a group have the same probe, and each step starts from the same weights.
Measured: the reward is the inner one plus alpha * max(0, 1 - |predicted - true|), averaged over the replies of an
episode.
Range: that of the inner environment, plus 0 to alpha. A reply without a number for the prediction adds 0; without
ANSWER the inner environment gets "".
Known hacks: predict 0, because one small step changes little; give an answer that contains the probe's answer, or a
long one, so that its effect is easy to predict; and choose answers for the sake of the prediction, if alpha is large
relative to the inner reward.
Control: `over_constant`, the closeness of the prediction minus that of 0: it is 0 for the first hack. `true` is the
effect, and `inner` the reward without the prediction, which must not fall; both expose the other hacks.
Cost per reply: one training step and one forward pass of the shadow; per group one more; per snapshot one saved state.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Self

from tinker_cookbook.env.arguments import arguments_called
from tinker_cookbook.env.dataset import DatasetSettings, Environment
from tinker_cookbook.env.registry import get_env
from tinker_cookbook.env.shipped.model_aware.intuition_env import IntuitionEnv, Turn
from tinker_cookbook.env.shipped.model_aware.lessons import Probe, probe_prompt, shipped_lessons
from tinker_cookbook.env.shipped.model_aware.model_scores import encode
from tinker_cookbook.env.shipped.model_aware.shadow import answer_datum, shadow_of
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.item_dataset import refuse_pool
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    EpisodeEnv,
    Metrics,
    Record,
    RLDataset,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.utils.seeds import derive_seed


def closeness(predicted: float, true: float) -> float:
    """0 to 1."""
    return max(0.0, 1.0 - abs(predicted - true))


@dataclass(frozen=True)
class IntuitionGroupBuilder(EnvGroupBuilder):
    """The group of the inner environment, with one probe for all members."""

    inner: EnvGroupBuilder
    probe: Probe
    renderer: Renderer
    alpha: float
    learning_rate: float
    max_prompt_tokens: int | None = None
    clients: RunClients | None = field(default=None, kw_only=True)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), inner=copy.copy(self.inner))  # it keeps what it opens for its own envs
        return copied

    def with_clients(self, clients: RunClients) -> Self:
        return replace(self, inner=self.inner.with_clients(clients), clients=clients)

    @property
    def coordinated(self) -> bool:
        return self.inner.coordinated

    async def make_envs(self) -> Sequence[IntuitionEnv]:
        if self.clients is None or self.clients.training_client is None or self.clients.service_client is None:
            raise ConfigurationError(
                "gradient_intuition needs the training_client and service_client of a training run, and this is not one, or "
                "plays in another process: leave the rollout executor out"
            )
        envs: list[IntuitionEnv] = []
        for env in await self.inner.make_envs():
            if isinstance(env, EpisodeEnv):
                raise ConfigurationError(
                    f"gradient_intuition adds a question to each prompt, and {type(env).__name__} asks the policy itself; give "
                    "an environment that shows its prompts, with initial_observation and step"
                )
            envs.append(IntuitionEnv(env, self.probe, self.renderer, self.max_prompt_tokens))
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        envs = [env for env in env_group if isinstance(env, IntuitionEnv)]
        inner = await self.inner.compute_group_rewards(trajectory_group, _inner(env_group))
        changes = iter(await self._changes([turn for env in envs for turn in env.turns if turn.is_scored]))
        scores: list[tuple[float, Metrics]] = []
        for env, trajectory, (reward, metrics) in zip(envs, trajectory_group, inner, strict=True):
            if env.turns:
                of_inner = sum(transition.reward for transition in trajectory.transitions) + reward
                metrics = {**metrics, "inner": of_inner}
            predictions = [
                (turn.predicted, next(changes)) for turn in env.turns if turn.predicted is not None and turn.is_scored
            ]
            if predictions:
                env_metrics = _prediction_metrics(predictions)
                reward += self.alpha * env_metrics["closeness"] * len(predictions) / len(env.turns)
                metrics = {**metrics, **env_metrics}
            scores.append((reward, metrics))
        return scores

    async def _changes(self, turns: Sequence[Turn]) -> list[float]:
        """One per turn; equal answers to equal prompts share a step."""
        if not turns or self.clients is None:
            return []
        tokenizer = self.renderer.tokenizer
        probe = answer_datum(encode(tokenizer, probe_prompt(self.probe)), encode(tokenizer, f" {self.probe.answer}"))
        steps = {(tuple(turn.prompt), tuple(turn.answer)): answer_datum(turn.prompt, turn.answer) for turn in turns}
        shadow = await shadow_of(self.clients)
        changes = await shadow.changes(self.clients.sampling_client, list(steps.values()), probe, self.learning_rate)
        of_step = dict(zip(steps, changes, strict=True))
        return [of_step[tuple(turn.prompt), tuple(turn.answer)] for turn in turns]

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool] | None:
        return self.inner.select_trained(trajectory_group, _inner(env_group))

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        return self.inner.describe_records(group, _inner(env_group))

    def member_roles(self, env_group: Sequence[Env]) -> list[str]:
        return self.inner.member_roles(_inner(env_group))

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return self.inner.describe_members(_inner(env_group))

    def rate_ranges(self) -> dict[str, tuple[float, float]]:
        return self.inner.rate_ranges()

    async def cleanup(self) -> None:
        await self.inner.cleanup()

    def logging_tags(self) -> list[str]:
        return [*self.inner.logging_tags(), "gradient_intuition"]


def _inner(env_group: Sequence[Env]) -> list[Env]:
    return [env.inner for env in env_group if isinstance(env, IntuitionEnv)]


def _prediction_metrics(predictions: Sequence[tuple[float, float]]) -> Metrics:
    """Means over the predictions of an episode, each with its true value."""
    close = [closeness(predicted, true) for predicted, true in predictions]
    return {
        "told": fmean(predicted for predicted, _ in predictions),
        "true": fmean(true for _, true in predictions),
        "closeness": fmean(close),
        "sign": fmean(float((predicted > 0) == (true > 0)) for predicted, true in predictions),
        "over_constant": fmean(
            reward - closeness(0.0, true) for reward, (_, true) in zip(close, predictions, strict=True)
        ),
    }


@dataclass(frozen=True)
class GradientIntuition(Environment):
    """An inner environment whose prompts also ask for a prediction.

    Attributes:
        alpha: weight of the prediction.
        learning_rate: of the shadow's step.
    """

    inner: Environment
    alpha: float
    learning_rate: float

    def check(self, settings: DatasetSettings) -> None:
        self.inner.build(settings)

    def shared_system_prompt(self, settings: DatasetSettings) -> str | None:
        return self.inner.build(settings).shared_system_prompt

    def needs_starting_policy(self, settings: DatasetSettings) -> bool:
        return self.inner.build(settings).needs_starting_policy

    async def datasets(self, settings: DatasetSettings) -> tuple[RLDataset, RLDataset | None]:
        training, test = await self.inner.build(settings)()
        return (
            IntuitionDataset(training, self, settings, "train"),
            None if test is None else IntuitionDataset(test, self, settings, "test"),
        )


class IntuitionDataset(RLDataset):
    """The inner batches; group i of batch b always has the same probe."""

    def __init__(self, inner: RLDataset, env: GradientIntuition, settings: DatasetSettings, part: str):
        refuse_pool(inner, "inner")
        self._inner, self._env, self._settings, self._part = inner, env, settings, part
        self._probes = [probe for lesson in shipped_lessons() for probe in lesson.probes]
        self._renderer = settings.renderer()

    def get_batch(self, index: int) -> list[IntuitionGroupBuilder]:
        groups: list[IntuitionGroupBuilder] = []
        longest = self._settings.max_prompt_tokens
        for i, group in enumerate(self._inner.get_batch(index)):
            drawn = random.Random(derive_seed(self._settings.seed, self._part, index, i)).choice(self._probes)
            options = (self._env.alpha, self._env.learning_rate, longest)
            groups.append(IntuitionGroupBuilder(group, drawn, self._renderer, *options))
        return groups

    def __len__(self) -> int:
        return len(self._inner)

    def count_groups(self, index: int) -> int | None:
        return self._inner.count_groups(index)


def load_environment(
    inner: Any = "self_prediction",
    inner_args: Mapping[str, Any] | None = None,
    alpha: float = 0.3,
    learning_rate: float = 1e-4,
) -> Environment:
    """`inner` is what `get_env` takes, with its arguments. Raises ConfigurationError for numbers out of range."""
    if not 0 <= alpha < float("inf") or not 0 < learning_rate < 1:
        raise ConfigurationError(
            f"alpha={alpha}, learning_rate={learning_rate}: alpha must be at least 0, learning_rate between 0 and 1"
        )
    with arguments_called("inner_args"):
        return GradientIntuition(get_env(inner, inner_args), alpha, learning_rate)
