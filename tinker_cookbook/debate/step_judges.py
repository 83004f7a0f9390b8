"""Judges weaker than the debaters: each checks one step of an answer, and must be told which."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import chz

from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.endpoints import EndpointConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.tasks.steps import Step
from tinker_cookbook.weights_config import WeightsConfig

CHECK_SYSTEM = "Check one step. Reply with <VERDICT>RIGHT</VERDICT> or <VERDICT>WRONG</VERDICT>."
WEIGHTS, ENDPOINT = "step_judge.weights", "step_judge.endpoint"

_VERDICT = re.compile(r"<VERDICT>\s*(RIGHT|WRONG)\s*</VERDICT>")


class StepJudge(ABC):
    @abstractmethod
    async def __call__(self, step: Step, key: tuple[int, ...]) -> bool | None:
        """Whether the step holds; None when no verdict could be had. `key` names the check, for judges that sample."""


@dataclass(frozen=True)
class ScriptedStepJudge(StepJudge):
    """Checks the step without a mistake. It is weak in that it sees no other."""

    async def __call__(self, step: Step, key: tuple[int, ...]) -> bool | None:
        return step.holds


@dataclass(frozen=True)
class LMStepJudge(StepJudge):
    """Asks a language model whether the step's claim is right; it is shown nothing else. None for an unreadable reply.

    A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.
    """

    completer: MessageCompleter | TokenCompleter
    renderer: Renderer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.completer, TokenCompleter) and self.renderer is None:
            raise ConfigurationError("an LMStepJudge over a TokenCompleter needs the renderer of its model")

    async def __call__(self, step: Step, key: tuple[int, ...]) -> bool | None:
        messages: list[Message] = [
            {"role": "system", "content": CHECK_SYSTEM},
            {"role": "user", "content": step.claim},
        ]
        found = set(_VERDICT.findall(await self._ask(messages, key)))
        return found == {"RIGHT"} if len(found) == 1 else None

    async def _ask(self, messages: list[Message], key: tuple[int, ...]) -> str:
        if isinstance(self.completer, MessageCompleter):
            return get_text_content(await self.completer.fork("step judge", *key)(messages))
        assert self.renderer is not None
        prompt = self.renderer.build_generation_prompt(messages)
        reply = await self.completer.fork("step judge", *key)(prompt, self.renderer.get_stop_sequences())
        return decode_reply(self.renderer, reply.tokens)


@chz.chz(typecheck=True)
class StepJudgeConfig:
    """Which judge checks the named step. The weights of an lm judge are frozen."""

    name: Literal["scripted", "lm", "endpoint"] = chz.field(
        default="scripted", doc="scripted (makes no mistake), lm or endpoint"
    )
    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="of an lm judge")
    endpoint: EndpointConfig = chz.field(default_factory=EndpointConfig, doc="of an endpoint judge")
    max_tokens: int = chz.field(
        default=16, doc="longest verdict of an lm or endpoint judge", validator=chz.validators.gt(0)
    )
    temperature: float = chz.field(
        default=0.0, doc="of an lm or endpoint judge; 0 is greedy", validator=chz.validators.ge(0)
    )

    def check(self) -> None:
        """Raise ConfigurationError for weights or an endpoint that cannot be opened."""
        if self.name == "lm":
            self.weights.check(WEIGHTS)
        self.endpoint.check_used(ENDPOINT, self.name == "endpoint", "step_judge.name=endpoint")

    async def make(self, seed: int) -> StepJudge:
        """The judge, from a snapshot made here."""
        if self.name == "scripted":
            return ScriptedStepJudge()
        if self.name == "endpoint":
            return LMStepJudge(self.endpoint.open(ENDPOINT, self.max_tokens, self.temperature, seed))
        policy = await self.weights.open_policy(WEIGHTS)
        if policy.context_length is not None and self.max_tokens >= policy.context_length:
            raise ConfigurationError(
                f"step_judge.max_tokens={self.max_tokens} fills the judge's context of {policy.context_length}; lower it"
            )
        completer = TinkerTokenCompleter(policy.sampling_client, self.max_tokens, self.temperature, seed=seed)
        return LMStepJudge(completer, policy.renderer)
