"""Judges weaker than the debaters: each checks one step of an answer, and must be told which."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import chz

from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.tasks.steps import Step
from tinker_cookbook.weights_config import WeightsConfig

CHECK_SYSTEM = "Check one step. Reply with <VERDICT>RIGHT</VERDICT> or <VERDICT>WRONG</VERDICT>."
WEIGHTS = "step_judge.weights"

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
    """Asks a language model whether the step's claim is right; it is shown nothing else. None for an unreadable reply."""

    completer: TokenCompleter
    renderer: Renderer

    async def __call__(self, step: Step, key: tuple[int, ...]) -> bool | None:
        prompt = self.renderer.build_generation_prompt(
            [{"role": "system", "content": CHECK_SYSTEM}, {"role": "user", "content": step.claim}]
        )
        reply = await self.completer.fork("step judge", *key)(prompt, self.renderer.get_stop_sequences())
        found = set(_VERDICT.findall(decode_reply(self.renderer, reply.tokens)))
        return found == {"RIGHT"} if len(found) == 1 else None


@chz.chz(typecheck=True)
class StepJudgeConfig:
    """Which judge checks the named step. The weights of an lm judge are frozen."""

    name: Literal["scripted", "lm"] = chz.field(default="scripted", doc="scripted (makes no mistake) or lm")
    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="of an lm judge")
    max_tokens: int = chz.field(default=16, doc="longest verdict of an lm judge", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=0.0, doc="of an lm judge; 0 is greedy", validator=chz.validators.ge(0))

    def check(self) -> None:
        """Raise ConfigurationError for weights of an lm judge that cannot be opened."""
        if self.name == "lm":
            self.weights.check(WEIGHTS)

    async def make(self, seed: int) -> StepJudge:
        """The judge, from a snapshot made here."""
        if self.name == "scripted":
            return ScriptedStepJudge()
        policy = await self.weights.open_policy(WEIGHTS)
        if policy.context_length is not None and self.max_tokens >= policy.context_length:
            raise ConfigurationError(
                f"step_judge.max_tokens={self.max_tokens} fills the judge's context of {policy.context_length}; lower it"
            )
        completer = TinkerTokenCompleter(policy.sampling_client, self.max_tokens, self.temperature, seed=seed)
        return LMStepJudge(completer, policy.renderer)
