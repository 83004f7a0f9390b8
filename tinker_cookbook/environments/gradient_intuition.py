"""Gradient intuition: what training on its own answer would do to the policy, told together with the answer.

Wraps any environment of one reply. The prompt is the inner one with a probe, a question and its answer; the reply is PREDICTION,
a signed number, and ANSWER, what the inner environment is given, as tokens of its own. A shadow of the policy takes one Adam
step on the answer, and the truth is by how much that raises the probe's logprob, in nats. All members of a group have the same
probe, and each its own step from the same start.
Measured: the reward is the inner one plus alpha * max(0, 1 - |told - true|). Range: that of the inner environment, plus 0 to
alpha. Without a number for the prediction there is only the inner reward; without ANSWER the inner environment is given "".
Known hacks: to say 0, since one small step moves little; an answer that holds the probe's answer, or is long, so that its effect
is easy to tell; and answers for the sake of the prediction, where alpha is large beside the inner reward.
Control: `over_constant`, the closeness of the prediction minus that of 0: it is 0 for the first hack. `true` is the effect, and
`inner` the reward without the prediction, which must not fall; both show the others.
Cost per reply: one training step and one forward pass of the shadow; per group one more; per snapshot one saved state.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import chz

from tinker_cookbook.environments.base import DatasetSettings, Environment
from tinker_cookbook.environments.lessons import Probe, probe_prompt, shipped_lessons
from tinker_cookbook.environments.model_scores import encode
from tinker_cookbook.environments.registry import get_env
from tinker_cookbook.environments.shadow import answer_datum, shadow_of
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.problem_env import OneTurnEnv, Reply
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    Trajectory,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.seeds import derive_seed

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,6}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})")


class Intuition(NamedTuple):
    """A predicted change, in nats, with its sign, and the answer. None: not told."""

    told: float | None
    answer: str | None


def parse_intuition(reply: str) -> Intuition:
    """What a reply says. Without ANSWER it says nothing."""
    said, told = reply.lstrip(), None
    if said.startswith("PREDICTION:"):
        line, _, rest = said.partition("\n")
        number = _NUMBER.fullmatch(line.removeprefix("PREDICTION:").strip(" "))
        said, told = rest.lstrip(), float(number[0]) if number else None
    if not said.startswith("ANSWER:"):
        return Intuition(None, None)
    return Intuition(told, said.removeprefix("ANSWER:").lstrip(" "))


def closeness(told: float, true: float) -> float:
    """0 to 1."""
    return max(0.0, 1.0 - abs(told - true))


def meta_task(probe: Probe) -> str:
    """What is asked beside the inner task."""
    return (
        "\n\nSuppose that you are trained for one step on your answer to this. By how much would that change your "
        f'log-probability of the reply "{probe.answer}" to "{probe.question}", in nats? Write two '
        "lines:\nPREDICTION: -0.01\nANSWER: your answer"
    )


class IntuitionEnv(OneTurnEnv):
    """One inner environment with a probe.

    Attributes:
        said: what the reply was read as, once there is one.
        step_on: ids of the inner prompt and of the answer, with the end that the policy gave it.
    """

    def __init__(self, inner: OneTurnEnv, probe: Probe, renderer: Renderer):
        super().__init__(renderer)
        self.inner, self.probe = inner, probe
        self.max_prompt_tokens, self.instance_id = inner.max_prompt_tokens, inner.instance_id
        self.said = Intuition(None, None)
        self.step_on: tuple[list[int], list[int]] = ([], [])

    def get_messages(self) -> list[Message]:
        *before, last = self.inner.get_messages()
        return [*before, {"role": last["role"], "content": get_text_content(last) + meta_task(self.probe)}]

    def get_reference_answer(self) -> str | None:
        return self.inner.get_reference_answer()

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        raise NotImplementedError("the inner environment scores the answer, in step")

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        self.reply = Reply(message, termination, (extra or {}).get("stop_reason") == "stop")
        self.said = parse_intuition(self.reply.text)
        end = list(action[-1:]) if action and action[-1] in self.stop_condition else []
        answer = [*encode(self.renderer.tokenizer, self.said.answer or ""), *end]
        prompt = await self.inner.initial_observation()
        if not isinstance(prompt, InitialObservationOverflow):
            self.step_on = prompt[0].to_ints(), answer
        result = await self.inner.step(answer, extra=extra)
        forms = {"answered": float(self.said.answer is not None), "predicted": float(self.said.told is not None)}
        return replace(result, metrics={**result.metrics, "inner": result.reward, **forms})


@dataclass(frozen=True)
class IntuitionGroupBuilder(EnvGroupBuilder):
    """The group of the inner environment, with one probe for all members."""

    inner: EnvGroupBuilder
    probe: Probe
    renderer: Renderer
    alpha: float
    learning_rate: float
    clients: RunClients | None = field(default=None, kw_only=True)

    def with_clients(self, clients: RunClients) -> Self:
        return replace(self, inner=self.inner.with_clients(clients), clients=clients)

    async def make_envs(self) -> Sequence[IntuitionEnv]:
        if self.clients is None or self.clients.training_client is None or self.clients.service_client is None:
            raise ConfigurationError(
                "gradient_intuition needs the training_client and service_client of a training run, and this is none"
            )
        envs = []
        for env in await self.inner.make_envs():
            if not isinstance(env, OneTurnEnv):
                raise ConfigurationError(
                    f"gradient_intuition wraps environments of one reply, and {type(env).__name__} may have several turns; give "
                    "one with dataset and rubric, or what single_turn_env() gives"
                )
            envs.append(IntuitionEnv(env, self.probe, self.renderer))
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        envs = [env for env in env_group if isinstance(env, IntuitionEnv)]
        inner = await self.inner.compute_group_rewards(trajectory_group, [env.inner for env in envs])
        told = [env for env in envs if env.said.told is not None and env.step_on[1]]
        found = iter(await self._changes(told))
        scores = []
        for env, (reward, metrics) in zip(envs, inner, strict=True):
            if env in told and env.said.told is not None:
                true = next(found)
                close = closeness(env.said.told, true)
                reward += self.alpha * close
                metrics = {
                    **metrics,
                    "told": env.said.told,
                    "true": true,
                    "closeness": close,
                    "sign": float((env.said.told > 0) == (true > 0)),
                    "over_constant": close - closeness(0.0, true),
                }
            scores.append((reward, metrics))
        return scores

    async def _changes(self, envs: Sequence[IntuitionEnv]) -> list[float]:
        """One for each member; members that answered alike share a step."""
        if not envs or self.clients is None:
            return []
        tokenizer = self.renderer.tokenizer
        probe = answer_datum(encode(tokenizer, probe_prompt(self.probe)), encode(tokenizer, f" {self.probe.answer}"))
        steps = {
            (tuple(prompt), tuple(answer)): answer_datum(prompt, answer) for prompt, answer in (e.step_on for e in envs)
        }
        shadow = await shadow_of(self.clients)
        changes = await shadow.changes(self.clients.sampling_client, list(steps.values()), probe, self.learning_rate)
        of_step = dict(zip(steps, changes, strict=True))
        return [of_step[tuple(env.step_on[0]), tuple(env.step_on[1])] for env in envs]

    def logging_tags(self) -> list[str]:
        return [*self.inner.logging_tags(), "gradient_intuition"]


class IntuitionDataset(RLDataset):
    """The inner batches; group i of batch b always has the same probe."""

    def __init__(self, inner: RLDataset, builder: "IntuitionDatasetBuilder", part: str):
        self._inner, self._builder, self._part = inner, builder, part
        self._probes = [probe for lesson in shipped_lessons() for probe in lesson.probes]
        self._renderer = get_renderer(
            builder.renderer_name, get_tokenizer(builder.model_name), model_name=builder.model_name
        )

    def get_batch(self, index: int) -> list[IntuitionGroupBuilder]:
        own, groups = self._builder, []
        for i, group in enumerate(self._inner.get_batch(index)):
            drawn = random.Random(derive_seed(own.seed, self._part, index, i)).choice(self._probes)
            groups.append(IntuitionGroupBuilder(group, drawn, self._renderer, own.alpha, own.learning_rate))
        return groups

    def __len__(self) -> int:
        return len(self._inner)

    def count_groups(self, index: int) -> int | None:
        return self._inner.count_groups(index)


@chz.chz(typecheck=True)
class IntuitionDatasetBuilder(RLDatasetBuilder):
    """The dataset of an inner environment, each of whose groups has a probe."""

    inner: RLDatasetBuilder = chz.field(doc="the inner environment's")
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    alpha: float = chz.field(doc="weight of the prediction")
    learning_rate: float = chz.field(doc="of the shadow's step")
    seed: int = chz.field(doc="seed of the probes")

    @property
    def shared_system_prompt(self) -> str | None:
        return self.inner.shared_system_prompt

    @property
    def needs_starting_policy(self) -> bool:
        return self.inner.needs_starting_policy

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        training, test = await self.inner()
        return IntuitionDataset(training, self, "train"), None if test is None else IntuitionDataset(test, self, "test")


@dataclass(frozen=True)
class GradientIntuition(Environment):
    """An inner environment, each of whose prompts asks for a prediction too."""

    inner: Environment
    alpha: float
    learning_rate: float

    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        assert settings.renderer_name is not None
        return IntuitionDatasetBuilder(
            inner=self.inner.build(settings),
            model_name=settings.model_name,
            renderer_name=settings.renderer_name,
            alpha=self.alpha,
            learning_rate=self.learning_rate,
            seed=settings.seed,
        )


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
    return GradientIntuition(get_env(inner, inner_args), alpha, learning_rate)
