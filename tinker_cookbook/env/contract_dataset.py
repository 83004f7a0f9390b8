"""The dataset of groups for an environment of the `load_environment` contract and a model."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tinker_cookbook.env.contract import (
    Questions,
    check_build,
    form_of,
    is_prompt,
    missing_parts,
    read_needs,
    read_questions,
)
from tinker_cookbook.env.contract_groups import (
    BuiltWithClients,
    LoadedOnce,
    LoadedPerGroup,
    RubricEnv,
    RubricGroupBuilder,
    StepsGroupBuilder,
    copy_for_member,
    steps_env,
)
from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.env.episodes import MAX_TURNS
from tinker_cookbook.env.mixed_forms import as_questions
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import parameter_problem
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import EnvGroupBuilder


class LoadedEnvironment(Environment):
    """The result of `load_environment(**args)`.

    Attributes:
        name: its name in errors and metrics.
        loaded: the object, of one of the three forms.
        load, args: make it; None for an object that a script made.
        questions: for an object with dataset and rubric; None for the other forms.
        needs: the clients that it requires.
        only_evaluated: whether nothing trains on it, so that all of it may be evaluated.
    """

    only_evaluated = False

    def __init__(
        self,
        name: str,
        loaded: Any,
        load: Callable[..., Any] | None,
        args: Mapping[str, Any],
        questions: Questions | None,
        needs: tuple[str, ...],
    ):
        self.name, self.loaded, self.load, self.args = name, loaded, load, dict(args)
        self.questions, self.needs = questions, needs

    def named(self, name: str) -> "LoadedEnvironment":
        """The same under another name."""
        other = copy.copy(self)
        if self.questions is not None:
            other.questions = replace(self.questions, scoring=replace(self.questions.scoring, owner=name))
        other.name = name
        return other

    def for_evaluation(self) -> "LoadedEnvironment":
        """The same with a test set in any case: for questions without `eval_dataset` it is `dataset`."""
        other = copy.copy(self)
        other.only_evaluated = True
        if self.questions is not None and not self.questions.test_rows:
            other.questions = replace(self.questions, test_rows=self.questions.rows)
        return other

    def model_dump(self) -> dict[str, Any]:
        """For the config of a run, which should not contain the rows."""
        return {"name": self.name, "args": self.args, "found": f"{type(self.loaded)}", "needs": list(self.needs)}

    def shared_system_prompt(self, settings: DatasetSettings) -> str | None:
        return (self.questions.system_prompt or None) if self.questions is not None else None

    async def groups(self, settings: DatasetSettings) -> Groups:
        if self.questions is not None:
            return self._of_rows(self.questions, settings)
        return self._of_episodes(settings)

    def _of_rows(self, questions: Questions, settings: DatasetSettings) -> Groups:
        renderer = settings.renderer()

        def make(row: Mapping[str, Any], attempts: int, place: Place) -> EnvGroupBuilder:
            env = partial(RubricEnv, questions, row, renderer, max_prompt_tokens=settings.max_prompt_tokens)
            return RubricGroupBuilder(env, attempts, self.name, questions=questions, row=row, renderer=renderer)

        return Groups(make, questions.rows, questions.test_rows)

    def _of_episodes(self, settings: DatasetSettings) -> Groups:
        """If it draws episodes at random, evaluations use other draws."""
        renderer, tested = settings.renderer(), self.only_evaluated
        if form_of(self.loaded) == "builder":
            source = BuiltWithClients(self.loaded, self.needs, self.name, settings.seed)
        elif self.draws() and self.load is not None:
            source, tested = LoadedPerGroup(self.load, self.args, self.name), True
        else:
            source = LoadedOnce(self.loaded, self.name)
        options = {
            "max_trajectory_tokens": settings.max_prompt_tokens,
            "rollout_limits": RolloutLimits(max_turns=self.max_turns),
        }

        def make(number: int, attempts: int, place: Place) -> EnvGroupBuilder:
            return StepsGroupBuilder(
                partial(steps_env, self.name),
                attempts,
                renderer,
                self.name,
                options,
                source=source,
                needs=self.needs,
                number=number,
                seed=place.seed,
            )

        return Groups(make, test=None if tested else ())

    def draws(self) -> bool:
        """Whether it takes `rng`, and so draws a new episode for each group."""
        return self.load is not None and "rng" in inspect.signature(self.load).parameters

    @property
    def max_turns(self) -> int:
        """Replies per episode."""
        return getattr(self.loaded, "max_turns", MAX_TURNS)


def loaded_environment(
    name: str, loaded: Any, load: Callable[..., Any] | None = None, args: Mapping[str, Any] | None = None
) -> LoadedEnvironment:
    """An object of the contract, with all checks that need no model and no event loop.

    Raises ConfigurationError: none of the three forms is complete, or a part does not match `contract`.
    """
    form = form_of(loaded)
    if form is None:
        raise ConfigurationError(f"env={name}: {missing_parts(loaded)}")
    questions = read_questions(as_questions(loaded, name), name) if form == "questions" else None
    needs = check_build(loaded, name) if form == "builder" else read_needs(loaded, name)
    made = LoadedEnvironment(name, loaded, load, dict(args or {}), questions, needs)
    if form == "episodes":
        RolloutLimits(max_turns=made.max_turns)
        _check_episode(made)
    return made


def _check_episode(made: LoadedEnvironment) -> None:
    """Check the signatures of its methods, and that an object loaded only once shows the same observation each time.

    Groups play copies of it.
    """
    for name, given in (("initial_observation", ()), ("step", ("action_text",))):
        if problem := parameter_problem(getattr(made.loaded, name), given):
            raise ConfigurationError(f"{made.name}: {name} {problem}")
    if made.draws() or inspect.iscoroutinefunction(made.loaded.initial_observation):
        return
    one = copy_for_member(made.loaded, made.name)
    first, second = one.initial_observation(), one.initial_observation()
    if not is_prompt(first):
        raise ConfigurationError(f"{made.name}: initial_observation gave {first!r:.200}; it gives a text or messages")
    if first != second:
        raise ConfigurationError(
            f"{made.name}: initial_observation gives something else at each call, which neither a group nor a resumed run can "
            "repeat; let load_environment take `rng`, a random.Random, and draw from it, or return a dataset and a rubric"
        )
