"""Judges from a configuration: `mock`, `confidence`, `scripted:NAME`, or `lm`, a frozen model."""

from __future__ import annotations

import chz

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.judges import SCRIPTS, ConfidenceJudge, Judge, LMJudge, MockJudge, ScriptedJudge
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.weights_config import WeightsConfig

JUDGE_NAMES = "mock, confidence, lm, " + ", ".join(f"scripted:{name}" for name in SCRIPTS)
WEIGHTS = "judge.weights"
"""What the user calls the weights of an lm judge."""


@chz.chz(typecheck=True)
class JudgeConfig:
    """Which judge, and for `lm` which weights. They are frozen: a base model or a checkpoint, never the live policy."""

    name: str = chz.field(default="lm", doc=JUDGE_NAMES)
    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="of an lm judge")
    system_prompt: str = chz.field(default=JUDGE_SYSTEM, doc="what an lm judge is told")
    max_tokens: int = chz.field(default=96, doc="longest verdict", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=0.3, doc="of an lm judge; 0 is greedy", validator=chz.validators.ge(0))
    max_retries: int = chz.field(
        default=1, doc="how often an unreadable verdict is asked for again", validator=chz.validators.ge(0)
    )
    seed: int = chz.field(default=0, doc="seed of mock and lm judges")


def check_judge(config: JudgeConfig) -> None:
    """Raise ConfigurationError for a name that is none of JUDGE_NAMES, or for weights of an lm judge that cannot be opened."""
    kind, _, script = config.name.partition(":")
    if config.name == "lm":
        config.weights.check(WEIGHTS)
    elif config.name not in ("mock", "confidence") and (kind != "scripted" or script not in SCRIPTS):
        raise ConfigurationError(f"judge={config.name!r} is unknown; use {JUDGE_NAMES}")


async def make_judge(config: JudgeConfig) -> Judge:
    """The judge that the config asks for. An lm judge is one frozen snapshot, made here."""
    check_judge(config)
    if config.name == "mock":
        return MockJudge(config.seed)
    if config.name == "confidence":
        return ConfidenceJudge()
    if config.name.startswith("scripted:"):
        return ScriptedJudge(SCRIPTS[config.name.partition(":")[2]])
    policy = await config.weights.open_policy(WEIGHTS)
    completer = TinkerTokenCompleter(policy.sampling_client, config.max_tokens, config.temperature, seed=config.seed)
    room = None if policy.context_length is None else policy.context_length - config.max_tokens
    return LMJudge(completer, policy.renderer, config.system_prompt, config.max_retries, room)
