"""Judges from a configuration: `mock`, `confidence`, `scripted:NAME`, or `lm`, a frozen model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import chz

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.judges import SCRIPTS, ConfidenceJudge, Judge, LMJudge, MockJudge, ScriptedJudge
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.weights_config import WeightsConfig

WEIGHTS = "judge.weights"
"""What the user calls the weights of an lm judge."""


@chz.chz(typecheck=True)
class JudgeConfig:
    """Which judge, and for `lm` which weights. They are frozen: a base model or a checkpoint, never the live policy."""

    name: str = chz.field(default="lm", doc="a name of JUDGES: mock, confidence, lm, scripted:...")
    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="of an lm judge")
    system_prompt: str = chz.field(default=JUDGE_SYSTEM, doc="what an lm judge is told")
    max_tokens: int = chz.field(default=96, doc="longest verdict", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=0.3, doc="of an lm judge; 0 is greedy", validator=chz.validators.ge(0))
    max_retries: int = chz.field(
        default=1, doc="how often an unreadable verdict is asked for again", validator=chz.validators.ge(0)
    )
    seed: int = chz.field(default=0, doc="seed of mock and lm judges")


async def _mock(config: JudgeConfig) -> Judge:
    return MockJudge(config.seed)


async def _confidence(config: JudgeConfig) -> Judge:
    return ConfidenceJudge()


async def _scripted(config: JudgeConfig) -> Judge:
    return ScriptedJudge(SCRIPTS[config.name.partition(":")[2]])


async def _lm(config: JudgeConfig) -> Judge:
    """One frozen snapshot, made here."""
    policy = await config.weights.open_policy(WEIGHTS)
    completer = TinkerTokenCompleter(policy.sampling_client, config.max_tokens, config.temperature, seed=config.seed)
    room = None if policy.context_length is None else policy.context_length - config.max_tokens
    return LMJudge(completer, policy.renderer, config.system_prompt, config.max_retries, room)


JUDGES: dict[str, Callable[[JudgeConfig], Awaitable[Judge]]] = {
    "mock": _mock,
    "confidence": _confidence,
    "lm": _lm,
    **{f"scripted:{name}": _scripted for name in SCRIPTS},
}
"""Name -> what makes the judge of a config."""
JUDGE_NAMES = ", ".join(JUDGES)


def check_judge(config: JudgeConfig) -> None:
    """Raise ConfigurationError for a name that is not in JUDGES, or for weights of an lm judge that cannot be opened."""
    if config.name not in JUDGES:
        raise ConfigurationError(f"judge={config.name!r} is unknown; use {JUDGE_NAMES}")
    if config.name == "lm":
        config.weights.check(WEIGHTS)


async def make_judge(config: JudgeConfig) -> Judge:
    """The judge that the config asks for. Raises ConfigurationError for an unknown name."""
    check_judge(config)
    return await JUDGES[config.name](config)
