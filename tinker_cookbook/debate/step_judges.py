"""Judges weaker than the debaters: each checks one step of an answer, and must be told which."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import chz

from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.debate.views import JudgeCall
from tinker_cookbook.endpoints import EndpointConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.tasks.steps import Step
from tinker_cookbook.weights_config import WeightsConfig

CHECK_SYSTEM = "Check one step. Reply with <VERDICT>RIGHT</VERDICT> or <VERDICT>WRONG</VERDICT>."
WEIGHTS, ENDPOINT = "step_judge.weights", "step_judge.endpoint"
StepJudgeName = Literal["scripted", "lm", "endpoint"]
STEP_JUDGES: tuple[StepJudgeName, ...] = get_args(StepJudgeName)

_VERDICT = re.compile(r"<VERDICT>\s*(RIGHT|WRONG)\s*</VERDICT>")


@dataclass(frozen=True)
class StepVerdict:
    """What a judge says of a step, and in which words."""

    holds: bool | None
    """None: no verdict could be had"""
    raw_response: str = ""
    """the reply of a language model"""
    call: JudgeCall | None = None
    usage: Mapping[str, float] = field(default_factory=dict[str, float])
    """what asking an endpoint took: calls, tokens, cost"""


class StepJudge(ABC):
    @abstractmethod
    async def __call__(self, step: Step, key: tuple[int, ...]) -> StepVerdict:
        """Whether the step holds. `key` names the check, for judges that sample."""


@dataclass(frozen=True)
class ScriptedStepJudge(StepJudge):
    """Checks the step without a mistake. It is weak in that it sees no other."""

    async def __call__(self, step: Step, key: tuple[int, ...]) -> StepVerdict:
        return StepVerdict(step.holds)


@dataclass(frozen=True)
class LMStepJudge(StepJudge):
    """Asks a language model whether the step's claim is right; it is shown nothing else. An unreadable reply is no verdict.

    A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.
    """

    completer: MessageCompleter | TokenCompleter
    renderer: Renderer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.completer, TokenCompleter) and self.renderer is None:
            raise ConfigurationError("an LMStepJudge over a TokenCompleter needs the renderer of its model")

    async def __call__(self, step: Step, key: tuple[int, ...]) -> StepVerdict:
        messages: list[Message] = [
            {"role": "system", "content": CHECK_SYSTEM},
            {"role": "user", "content": step.claim},
        ]
        asked = self.completer.fork("step judge", *key)
        if isinstance(asked, MessageCompleter):
            return self._read(get_text_content(await asked(messages)), usage=asked.usage())
        assert self.renderer is not None
        prompt = self.renderer.build_generation_prompt(messages)
        reply = await asked(prompt, self.renderer.get_stop_sequences())
        call = JudgeCall(prompt.to_ints(), reply.tokens, reply.maybe_logprobs)
        return self._read(decode_reply(self.renderer, reply.tokens), call=call)

    @staticmethod
    def _read(text: str, **details: Any) -> StepVerdict:
        found = set(_VERDICT.findall(text))
        return StepVerdict(found == {"RIGHT"} if len(found) == 1 else None, text, **details)


@chz.chz(typecheck=True)
class StepJudgeConfig:
    """Which judge checks the named step. The weights of an lm judge are frozen."""

    name: StepJudgeName = chz.field(default="scripted", doc="scripted (makes no mistake), lm or endpoint")
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
