"""Questions of reasoning-gym's generators, each answered with one reply and scored by the generator itself."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import chz

from tinker_cookbook.env.arguments import check_type
from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.reasoning import package
from tinker_cookbook.env.reasoning.levels import LevelConfig, LevelPool
from tinker_cookbook.env.reasoning.questions import Generator, Mixture
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import EnvGroupBuilder, Metrics
from tinker_cookbook.utils.fields import fill
from tinker_cookbook.utils.narrowing import is_mapping

logger = logging.getLogger(__name__)


class ReasoningEnv(OneTurnEnv):
    """One question of a mixture.

    Args:
        item: the question's number; see Mixture.
    """

    def __init__(
        self,
        mixture: Mixture,
        item: int,
        is_test: bool,
        renderer: Renderer,
        system_prompt: str,
        max_prompt_tokens: int | None,
    ):
        super().__init__(renderer)
        self._entry = mixture.entry(item, is_test)
        self._system_prompt, self.max_prompt_tokens = system_prompt, max_prompt_tokens
        self.instance_id = self._entry.id

    def get_messages(self) -> list[Message]:
        question: Message = {"role": "user", "content": self._entry.content["question"]}
        return [{"role": "system", "content": self._system_prompt}, question] if self._system_prompt else [question]

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        answer = parse_solution(reply.text)
        reward, failed = 0.0, False
        if answer is not None:
            try:
                reward = float(self._entry.dataset.score_answer(answer, self._entry.content))
            except Exception as error:  # some generators fail on answers that they cannot read
                logger.debug("%s: score_answer failed on %.100r: %s", self.instance_id, answer, error)
                failed = True
        failed = failed or not math.isfinite(reward)
        reward = 0.0 if failed else reward
        metrics: Metrics = {
            "correct": float(reward >= 1.0),
            "parsed": float(answer is not None),
            "score_failed": float(failed),
            "stopped": float(reply.stopped),
            "context_overflow": 0.0,
        }
        return reward, metrics

    def get_reference_answer(self) -> str | None:
        answer = self._entry.content["answer"]
        return None if answer is None else str(answer)


@chz.chz(typecheck=True)
class ReasoningGym(LevelConfig, Environment):
    """A mixture of generators. Needs the extra `reasoning`."""

    generators: dict[str, float] = chz.field(doc="generators and their weights")
    config: dict[str, dict[str, Any]] = chz.field(
        default_factory=dict, doc="fields of generators' configs, as env.config.NAME.key=value"
    )
    size: int = chz.field(
        default=100_000,
        doc="training questions, of each level, after which they repeat",
        validator=chz.validators.gt(0),
    )
    system_prompt: str = chz.field(
        default=QA_SYSTEM, doc="put before each question; the answer is read between <SOLUTION> tags"
    )
    curriculum: bool = chz.field(default=False, doc="move through the levels that the package defines for a generator")
    run_answers: bool = chz.field(
        default=False, doc="allow generators that evaluate answers as Python, in this process and without a sandbox"
    )

    @chz.validate
    def _check_package(self) -> None:
        self.mixture(0)

    @chz.validate
    def _check_levels(self) -> None:
        default = LevelConfig()
        for name in ("raise_at", "lower_at", "window"):
            if not self.curriculum and (value := getattr(self, name)) != getattr(default, name):
                raise ConfigurationError(f"env.{name}={value}: belongs to the curriculum; add env.curriculum=True")

    def mixture(self, seed: int) -> Mixture:
        """The generators, checked. Raises ConfigurationError."""
        weights = self.generators
        package.check_names(weights, "env=reasoning_gym")
        if not weights:
            raise ConfigurationError("env=reasoning_gym: name generators, as in env=reasoning_gym:leg_counting")
        for name, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ConfigurationError(f"env=reasoning_gym:{name}:{weight}: a weight is a number above 0")
        for name in self.config:
            if name not in weights:
                raise ConfigurationError(f"env.config.{name}: is not asked; env=reasoning_gym has {', '.join(weights)}")
        package.check_stable(weights)
        if not self.run_answers:
            package.check_safe(weights)
        made = tuple(self._generator(name, float(weight)) for name, weight in weights.items())
        return Mixture(made, self.size, seed)

    def _generator(self, name: str, weight: float) -> Generator:
        if self.curriculum and not package.has_levels(name):
            raise ConfigurationError(f"env.curriculum=True: {name} has no levels; leave one of the two out")
        overrides = package.read_overrides(name, self.config.get(name, {}), self.curriculum)
        return Generator(name, weight, overrides, package.count_levels(name, overrides) if self.curriculum else None)

    def shared_system_prompt(self, settings: DatasetSettings) -> str | None:
        return self.system_prompt or None

    async def groups(self, settings: DatasetSettings) -> Groups:
        mixture, renderer = self.mixture(settings.seed), settings.renderer()

        def make(number: int, attempts: int, place: Place) -> EnvGroupBuilder:
            item = number if self.curriculum or place.is_test else number % mixture.size
            parts = (mixture, item, place.is_test, renderer, self.system_prompt, settings.max_prompt_tokens)
            name = mixture.of_item(item, place.is_test).name
            return OneTurnGroupBuilder(partial(ReasoningEnv, *parts), attempts, name)

        if not self.curriculum:
            return Groups(make)
        pool = LevelPool(fill(LevelConfig, self), mixture)
        return Groups(make, range(mixture.size * mixture.num_levels), pool=pool)


def load_environment(generators: str | dict[str, float] = "", **args: Any) -> Environment:
    """`env=reasoning_gym:NAME,NAME:WEIGHT`, or `env=reasoning_gym env.generators=...`.

    Args:
        generators: names of reasoning-gym, each with a weight after a colon or 1; or name -> weight.
        args: other fields of ReasoningGym; config either whole or in parts, as {"config/leg_counting/max_animals": 4}.

    Raises:
        ConfigurationError: the package is not installed, or a name or value is wrong.
    """
    fields: dict[str, Any] = {}
    config: dict[str, dict[str, Any]] = {name: dict(one) for name, one in _whole_config(args.pop("config", {})).items()}
    known = chz.chz_fields(ReasoningGym)
    for key, value in args.items():
        head, *rest = key.split("/")
        if head == "config" and len(rest) == 2:
            config.setdefault(rest[0], {})[rest[1]] = value
        elif key in known and key != "generators":
            check_type("reasoning_gym", key, value, known[key].final_type)
            fields[key] = value
        else:
            takes = ", ".join(f"env.{name}" for name in known if name not in ("config", "generators"))
            raise ConfigurationError(
                f"env.{key.replace('/', '.')}: is unknown; reasoning_gym takes env.config.NAME.key, {takes}"
            )
    weights = _read_weights(generators) if isinstance(generators, str) else generators
    try:
        return ReasoningGym(generators=weights, config=config, **fields)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"env=reasoning_gym: {str(error).replace('X_', 'env.')}") from None


def _whole_config(given: Any) -> dict[str, dict[str, Any]]:
    if not is_mapping(given) or not all(is_mapping(one) for one in given.values()):
        raise ConfigurationError(f"env.config={given!r:.200}: is not a mapping of generators to their fields")
    return {str(name): dict(one) for name, one in given.items()}


def _read_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, colon, weight = part.partition(":")
        if name in weights:
            raise ConfigurationError(f"env=reasoning_gym:{text}: {name} is named twice; give it one weight")
        try:
            weights[name] = float(weight) if colon else 1.0
        except ValueError:
            raise ConfigurationError(f"env=reasoning_gym:{text}: {weight!r} is not a weight of {name}") from None
    return weights
