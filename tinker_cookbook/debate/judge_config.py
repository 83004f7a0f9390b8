"""Judges from a configuration: `mock`, `confidence`, `scripted:NAME`, or `lm`, a frozen model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import chz

from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.judges import SCRIPTS, ConfidenceJudge, Judge, LMJudge, MockJudge, ScriptedJudge
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@chz.chz(typecheck=True)
class JudgeConfig:
    """Which judge, and for `lm` which model. That model is frozen: the base model or a checkpoint, never the live policy."""

    name: str = chz.field(default="lm", doc="a name of JUDGES: mock, confidence, lm, scripted:...")
    model_name: str = chz.field(doc="base model of an lm judge")
    model_path: str | None = chz.field(
        default=None, doc="tinker:// path of an lm judge's weights; None: the base model"
    )
    renderer_name: str = chz.field(doc="renderer of the judge's model")
    backend: str | None = chz.field(default=None, doc="where an lm judge runs")
    base_url: str | None = chz.field(default=None, doc="server of an lm judge")
    system_prompt: str = chz.field(default=JUDGE_SYSTEM, doc="what an lm judge is told")
    max_tokens: int = chz.field(default=96, doc="longest verdict", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=0.3, doc="of an lm judge; 0 is greedy", validator=chz.validators.ge(0))
    max_retries: int = chz.field(
        default=1, doc="how often an unreadable verdict is asked for again", validator=chz.validators.ge(0)
    )
    context_window: int | None = chz.field(default=None, doc="of an lm judge's model; None: no limit")
    seed: int = chz.field(default=0, doc="seed of mock and lm judges")


async def _mock(config: JudgeConfig) -> Judge:
    return MockJudge(config.seed)


async def _confidence(config: JudgeConfig) -> Judge:
    return ConfidenceJudge()


async def _scripted(config: JudgeConfig) -> Judge:
    return ScriptedJudge(SCRIPTS[config.name.partition(":")[2]])


async def _lm(config: JudgeConfig) -> Judge:
    """One frozen snapshot, made here."""
    service = backends.create_service_client(config.backend, config.base_url)
    if config.model_path is not None:
        client = await service.create_sampling_client(model_path=config.model_path)
    else:
        client = await service.create_sampling_client(base_model=config.model_name)
    renderer = get_renderer(config.renderer_name, get_tokenizer(config.model_name), model_name=config.model_name)
    completer = TinkerTokenCompleter(client, config.max_tokens, config.temperature, seed=config.seed)
    room = None if config.context_window is None else config.context_window - config.max_tokens
    return LMJudge(completer, renderer, config.system_prompt, config.max_retries, room)


JUDGES: dict[str, Callable[[JudgeConfig], Awaitable[Judge]]] = {
    "mock": _mock,
    "confidence": _confidence,
    "lm": _lm,
    **{f"scripted:{name}": _scripted for name in SCRIPTS},
}
"""Name -> what makes the judge of a config."""
JUDGE_NAMES = ", ".join(JUDGES)


def check_judge(name: str) -> None:
    """Raise ConfigurationError for a name that is not in JUDGES."""
    if name not in JUDGES:
        raise ConfigurationError(f"judge={name!r} is unknown; use {JUDGE_NAMES}")


async def make_judge(config: JudgeConfig) -> Judge:
    """The judge that the config asks for. Raises ConfigurationError for an unknown name."""
    check_judge(config.name)
    return await JUDGES[config.name](config)
