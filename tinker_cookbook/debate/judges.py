"""Judges: who won a debate, and which judge a config means.

A, B and TIE are verdicts; INVALID means that none could be had. Nobody is favoured on a tie.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import chz

from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM, judge_user_prompt
from tinker_cookbook.endpoints import EndpointConfig
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.own_parts import Kind, describe, load_object, parameter_problem
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.replies import decode_reply
from tinker_cookbook.utils.misc_utils import resolved
from tinker_cookbook.utils.reward_threads import call_reward
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.weights_config import WeightsConfig

_VERDICT = re.compile(r"<VERDICT>\s*(A|B|TIE)\s*</VERDICT>")
_REASONING = re.compile(r"<REASONING>(.*?)</REASONING>", re.DOTALL)


class Winner(StrEnum):
    A = "A"
    B = "B"
    TIE = "TIE"
    INVALID = "INVALID"


@dataclass(frozen=True)
class JudgeCall:
    """What was asked of a token-level judge and what it sampled, for the record."""

    prompt_tokens: list[int]
    completion_tokens: list[int]
    completion_logprobs: list[float] | None


@dataclass(frozen=True)
class Verdict:
    winner: Winner
    reasoning: str = ""
    raw_response: str = ""
    call: JudgeCall | None = None
    retries: int = 0
    usage: Mapping[str, float] = field(default_factory=dict[str, float])
    """what asking an endpoint took: calls, tokens, cost"""


@dataclass(frozen=True)
class DebateView:
    """All that a judge may look at. `reward_*` is the task's reward, for judges that know the truth (baselines, tests)."""

    context: str
    rounds_a: list[str]
    rounds_b: list[str]
    confidence_a: float | None
    confidence_b: float | None
    reward_a: float
    reward_b: float
    key: tuple[int, ...]


class Judge(ABC):
    @abstractmethod
    async def __call__(self, view: DebateView) -> Verdict: ...


@dataclass(frozen=True)
class ScriptedJudge(Judge):
    """Decides by a function of the view. SCRIPTS holds the named ones. Pickles when the function does."""

    decide: Callable[[DebateView], Winner]

    async def __call__(self, view: DebateView) -> Verdict:
        return Verdict(self.decide(view), reasoning="scripted")


@dataclass(frozen=True)
class FunctionJudge(Judge):
    """A judge of one's own: a function of the view, sync or async, that returns a Winner, its name, or a Verdict."""

    decide: Callable[[DebateView], Any]

    async def __call__(self, view: DebateView) -> Verdict:
        """Raises DataValidationError for an answer that is no verdict."""
        said = await call_reward(self.decide, view)
        if isinstance(said, Verdict):
            return said
        if said not in set(Winner):
            names = ", ".join(winner.value for winner in Winner)
            raise DataValidationError(f"judge {describe(self.decide)} returned {said!r}; a verdict is one of {names}")
        return Verdict(Winner(said))


@dataclass(frozen=True)
class MockJudge(Judge):
    """A coin toss that depends on the seed and on which debate it is, not on who asks first."""

    seed: int

    async def __call__(self, view: DebateView) -> Verdict:
        toss = derive_seed(self.seed, "mock judge", *view.key) & 1
        return Verdict(Winner.B if toss else Winner.A, reasoning="coin toss")


@dataclass(frozen=True)
class ConfidenceJudge(Judge):
    """The seat that stated more confidence wins; equal ones tie; INVALID when one cannot be read."""

    async def __call__(self, view: DebateView) -> Verdict:
        a, b = view.confidence_a, view.confidence_b
        if a is None or b is None:
            return Verdict(Winner.INVALID, reasoning="no readable confidence")
        return Verdict(_compare(a, b), reasoning=f"confidence {a:g} against {b:g}")


@dataclass(frozen=True)
class LMJudge(Judge):
    """Asks a language model. A MessageCompleter takes messages; a TokenCompleter needs the renderer of its model.

    An unreadable reply is asked for again up to `max_retries` times, then INVALID. With a TokenCompleter, a debate whose
    prompt is longer than `max_prompt_tokens` is INVALID too.
    """

    completer: MessageCompleter | TokenCompleter
    renderer: Renderer | None = None
    system_prompt: str = JUDGE_SYSTEM
    max_retries: int = 1
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.completer, TokenCompleter) and self.renderer is None:
            raise ConfigurationError("an LMJudge over a TokenCompleter needs the renderer of its model")

    async def __call__(self, view: DebateView) -> Verdict:
        messages: list[Message] = [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": judge_user_prompt(view.context, view.rounds_a, view.rounds_b)},
        ]
        if (
            self.max_prompt_tokens is not None
            and self.renderer is not None
            and self.renderer.build_generation_prompt(messages).length > self.max_prompt_tokens
        ):
            return Verdict(Winner.INVALID, reasoning="the debate is too long for the judge's context")
        attempt, winner, text, call, usage = 0, None, "", None, Counter[str]()
        while winner is None and attempt <= self.max_retries:
            text, call, spent = await self._ask(messages, (*view.key, attempt))
            winner, attempt = parse_verdict(text), attempt + 1
            usage.update(spent)
        reasoning = _REASONING.search(text)
        told = reasoning.group(1).strip() if reasoning else ""
        return Verdict(winner or Winner.INVALID, told, text, call, retries=attempt - 1, usage=dict(usage))

    async def _ask(
        self, messages: list[Message], key: tuple[int, ...]
    ) -> tuple[str, JudgeCall | None, Mapping[str, float]]:
        if isinstance(self.completer, MessageCompleter):
            asked = self.completer.fork("judge", *key)
            return get_text_content(await asked(messages)), None, asked.usage()
        assert self.renderer is not None
        prompt = self.renderer.build_generation_prompt(messages)
        completer = self.completer.fork("judge", *key)
        reply: TokensWithLogprobs = await completer(prompt, self.renderer.get_stop_sequences())
        call = JudgeCall(prompt.to_ints(), reply.tokens, reply.maybe_logprobs)
        return decode_reply(self.renderer, reply.tokens), call, {}


def parse_verdict(text: str) -> Winner | None:
    """The verdict between the tags; None when there is none or several that differ."""
    found = set(_VERDICT.findall(text))
    return Winner(found.pop()) if len(found) == 1 else None


def _compare(a: float, b: float) -> Winner:
    return Winner.TIE if a == b else Winner.A if a > b else Winner.B


def _always(winner: Winner, view: DebateView) -> Winner:
    return winner


def _higher_reward(view: DebateView) -> Winner:
    return _compare(view.reward_a, view.reward_b)


def _said_more(view: DebateView) -> Winner:
    return _compare(len(" ".join(view.rounds_a)), len(" ".join(view.rounds_b)))


SCRIPTS: dict[str, Callable[[DebateView], Winner]] = {
    **{winner.value: partial(_always, winner) for winner in (Winner.A, Winner.B, Winner.TIE)},
    "truth": _higher_reward,
    "longer": _said_more,
}
"""Scripted judges by name: always one side, the higher task reward (an oracle), or whoever said more."""

WEIGHTS, ENDPOINT = "judge.weights", "judge.endpoint"
"""What the user calls the weights of an lm judge, and the endpoint of an endpoint judge."""


@chz.chz(typecheck=True)
class JudgeConfig:
    """Which judge, and for `lm` which weights. They are frozen: a base model or a checkpoint, never the live policy."""

    name: str | Callable[..., Any] = chz.field(
        default="lm",
        doc="mock, confidence, lm, endpoint, scripted:...; or your own: package.module:object, path/file.py:object",
    )
    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="of an lm judge")
    endpoint: EndpointConfig = chz.field(default_factory=EndpointConfig, doc="of an endpoint judge")
    system_prompt: str = chz.field(default=JUDGE_SYSTEM, doc="what an lm or endpoint judge is told")
    max_tokens: int = chz.field(default=96, doc="longest verdict")
    temperature: float = chz.field(default=0.3, doc="of an lm or endpoint judge; 0 is greedy")
    max_retries: int = chz.field(default=1, doc="how often an unreadable verdict is asked for again")
    seed: int | None = chz.field(default=None, doc="seed of mock, lm and endpoint judges; None: that of the dataset")

    @chz.validate
    def _check(self) -> None:
        for name, least in (("max_tokens", 1), ("temperature", 0), ("max_retries", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"judge.{name}={getattr(self, name)}: must be at least {least}")


async def _lm(config: JudgeConfig) -> Judge:
    """One frozen snapshot, made here."""
    policy = await config.weights.open_policy(WEIGHTS)
    completer = TinkerTokenCompleter(
        policy.sampling_client, config.max_tokens, config.temperature, seed=config.seed or 0
    )
    room = None if policy.context_length is None else policy.context_length - config.max_tokens
    return LMJudge(completer, policy.renderer, config.system_prompt, config.max_retries, room)


def _endpoint(config: JudgeConfig) -> Judge:
    """Whatever answers there. Nothing is rendered here, so the debate's length is the endpoint's business."""
    completer = config.endpoint.open(ENDPOINT, config.max_tokens, config.temperature, config.seed or 0)
    return LMJudge(completer, None, config.system_prompt, config.max_retries)


JudgeBuilder = Callable[["JudgeConfig"], Judge | Awaitable[Judge]]
"""What makes the judge of a config."""


def _scripted(name: str, config: JudgeConfig) -> Judge:
    return ScriptedJudge(SCRIPTS[name])


JUDGES: dict[str, JudgeBuilder] = {
    "mock": lambda config: MockJudge(config.seed or 0),
    "confidence": lambda _: ConfidenceJudge(),
    "lm": _lm,
    "endpoint": _endpoint,
    **{f"scripted:{name}": partial(_scripted, name) for name in SCRIPTS},
}
"""Name -> what makes the judge of a config: the library's, and those of `register_judge`."""
JUDGE_NAMES = ", ".join(JUDGES)


def _problem(found: Any) -> str | None:
    if isinstance(found, type):
        return None if issubclass(found, Judge) else f"is a class that is no Judge: {found.__name__}"
    return None if isinstance(found, Judge) else parameter_problem(found, ("view",))


JUDGE_KIND = Kind(
    key="judge.name",
    wanted="def judge(view: DebateView) -> Winner, sync or async; or a Judge, or a subclass that takes a JudgeConfig",
    example='''
def judge(view):  # a tinker_cookbook.debate.judges.DebateView
    """Whoever said less wins."""
    a, b = len(" ".join(view.rounds_a)), len(" ".join(view.rounds_b))
    return "TIE" if a == b else "A" if a < b else "B"
''',
    problem=_problem,
)


def register_judge(name: str, builder: JudgeBuilder) -> None:
    """Make a judge known under a name. Raises ConfigurationError for a name that is taken, or a builder that takes no config."""
    if name in JUDGES:
        raise ConfigurationError(f"judge.name={name!r} is taken; choose another")
    if problem := parameter_problem(builder, ("config",)):
        raise ConfigurationError(f"register_judge({name!r}): the builder {problem}")
    JUDGES[name] = builder


def _own_judge(config: JudgeConfig) -> Judge:
    if isinstance(config.name, str):
        found = JUDGE_KIND.check(load_object(JUDGE_KIND, config.name, JUDGES), repr(config.name))
    else:
        found = JUDGE_KIND.check(config.name, describe(config.name))
    if isinstance(found, type):
        return found(config)
    return found if isinstance(found, Judge) else FunctionJudge(found)


def check_judge(config: JudgeConfig) -> None:
    """Raise ConfigurationError for a name that means no judge, and for weights or an endpoint that cannot be opened."""
    if config.name not in JUDGES:
        _own_judge(config)
    if config.name == "lm":
        config.weights.check(WEIGHTS)
    if config.name in JUDGES:  # one of the user's own may ask it
        config.endpoint.check_used(ENDPOINT, config.name == "endpoint", "judge=endpoint")


async def make_judge(config: JudgeConfig) -> Judge:
    """The judge that the config asks for. Raises ConfigurationError for an unknown name."""
    check_judge(config)
    if not isinstance(config.name, str) or config.name not in JUDGES:
        return _own_judge(config)
    return await resolved(JUDGES[config.name](config))
