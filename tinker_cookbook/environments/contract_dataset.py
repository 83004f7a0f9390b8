"""An environment of the `load_environment` contract for a model: its dataset of groups."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import chz

from tinker_cookbook.environments.base import DatasetSettings, Environment
from tinker_cookbook.environments.contract import (
    Questions,
    check_build,
    form_of,
    is_prompt,
    read_needs,
    read_questions,
    what_lacks,
)
from tinker_cookbook.environments.contract_groups import (
    BuiltWithClients,
    LoadedOnce,
    LoadedPerGroup,
    RubricEnv,
    RubricGroupBuilder,
    StepsGroupBuilder,
    copy_for_member,
    steps_env,
)
from tinker_cookbook.environments.mixed_forms import as_questions
from tinker_cookbook.environments.multi_turn import MAX_TURNS
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.own_parts import parameter_problem
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.item_dataset import ItemDataset, evaluation_set
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.fields import fill
from tinker_cookbook.utils.seeds import derive_seed


class LoadedEnvironment(Environment):
    """What `load_environment(**args)` returned.

    Attributes:
        name: what errors and metrics call it.
        found: the object, of one of the three forms.
        load, args: give it; None for an object that a script made.
        questions: of an object with dataset and rubric; None for the other forms.
        needs: the clients that it cannot do without.
        only_evaluated: whether nothing trains on it, so that all of it may be evaluated.
    """

    only_evaluated = False

    def __init__(
        self,
        name: str,
        found: Any,
        load: Callable[..., Any] | None,
        args: Mapping[str, Any],
        questions: Questions | None,
        needs: tuple[str, ...],
    ):
        self.name, self.found, self.load, self.args = name, found, load, dict(args)
        self.questions, self.needs = questions, needs

    def named(self, name: str) -> "LoadedEnvironment":
        """The same under another name."""
        other = copy.copy(self)
        if self.questions is not None:
            other.questions = replace(self.questions, scoring=replace(self.questions.scoring, owner=name))
        other.name = name
        return other

    def for_evaluation(self) -> "LoadedEnvironment":
        """The same with a test set, whatever it has: of questions without `eval_dataset` it is `dataset`."""
        other = copy.copy(self)
        other.only_evaluated = True
        if self.questions is not None and not self.questions.test_rows:
            other.questions = replace(self.questions, test_rows=self.questions.rows)
        return other

    def model_dump(self) -> dict[str, Any]:
        """For the config of a run, which is not to hold the rows."""
        return {"name": self.name, "args": self.args, "found": str(type(self.found)), "needs": list(self.needs)}

    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        return fill(LoadedDatasetBuilder, settings, environment=self)

    def draws(self) -> bool:
        """Whether it takes `rng`, to draw another episode for each group."""
        return self.load is not None and "rng" in inspect.signature(self.load).parameters

    @property
    def max_turns(self) -> int:
        """Replies per episode."""
        return getattr(self.found, "max_turns", MAX_TURNS)


def loaded_environment(
    name: str, found: Any, load: Callable[..., Any] | None = None, args: Mapping[str, Any] | None = None
) -> LoadedEnvironment:
    """An object of the contract, checked as far as that needs no model and no event loop.

    Raises ConfigurationError: none of the three forms is complete, or a part of it is not as `contract` says.
    """
    form = form_of(found)
    if form is None:
        raise ConfigurationError(f"env={name}: {what_lacks(found)}")
    questions = read_questions(as_questions(found, name), name) if form == "questions" else None
    needs = check_build(found, name) if form == "builder" else read_needs(found, name)
    made = LoadedEnvironment(name, found, load, dict(args or {}), questions, needs)
    if form == "episodes":
        RolloutLimits(max_turns=made.max_turns)
        _check_episode(made)
    return made


def _check_episode(made: LoadedEnvironment) -> None:
    """That its methods take what they are given, and that an object which is loaded once shows the same each time.

    Copies of it are what groups play.
    """
    for name, given in (("initial_observation", ()), ("step", ("action_text",))):
        if problem := parameter_problem(getattr(made.found, name), given):
            raise ConfigurationError(f"{made.name}: {name} {problem}")
    if made.draws() or inspect.iscoroutinefunction(made.found.initial_observation):
        return
    one = copy_for_member(made.found, made.name)
    first, second = one.initial_observation(), one.initial_observation()
    if not is_prompt(first):
        raise ConfigurationError(f"{made.name}: initial_observation gave {first!r:.200}; it gives a text or messages")
    if first != second:
        raise ConfigurationError(
            f"{made.name}: initial_observation gives something else at each call, which neither a group nor a resumed run can "
            "repeat; let load_environment take `rng`, a random.Random, and draw from it, or return a dataset and a rubric"
        )


@chz.chz(typecheck=True)
class LoadedDatasetBuilder(RLDatasetBuilder):
    """Groups of an environment of the contract. Questions are evaluated on `eval_dataset`, episodes that draw on other draws."""

    environment: LoadedEnvironment = chz.field(doc="what load_environment returned")
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    groups_per_batch: int = chz.field(doc="questions or episodes per batch")
    group_size: int = chz.field(doc="attempts at each")
    num_batches: int = chz.field(doc="training batches")
    num_test: int = chz.field(doc="questions or episodes of an evaluation")
    seed: int = chz.field(doc="seed of the order of questions, and of episodes")
    max_prompt_tokens: int | None = chz.field(default=None, doc="longest prompt; None: no limit")

    def renderer(self) -> Renderer:
        return get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)

    @property
    def shared_system_prompt(self) -> str | None:
        questions = self.environment.questions
        return (questions.system_prompt or None) if questions is not None else None

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        if self.environment.questions is not None:
            return self._of_questions(self.environment.questions)
        return self._of_episodes()

    def _of_questions(self, questions: Questions) -> tuple[RLDataset, RLDataset | None]:
        renderer, name = self.renderer(), self.environment.name

        def group(size: int, row: Mapping[str, Any], key: tuple[int, int]) -> EnvGroupBuilder:
            env = partial(RubricEnv, questions, row, renderer, max_prompt_tokens=self.max_prompt_tokens)
            return RubricGroupBuilder(env, size, name, questions=questions, row=row, renderer=renderer)

        total = self.groups_per_batch * self.num_batches
        training = ItemDataset(questions.rows, partial(group, self.group_size), self.groups_per_batch, total, self.seed)
        return training, evaluation_set(questions.test_rows[: self.num_test], partial(group, 1))

    def _of_episodes(self) -> tuple[RLDataset, RLDataset | None]:
        made, renderer = self.environment, self.renderer()
        if form_of(made.found) == "builder":
            source, tested = BuiltWithClients(made.found, made.needs, made.name, self.seed), False
        elif made.draws() and made.load is not None:
            source, tested = LoadedPerGroup(made.load, made.args, made.name), True
        else:
            source, tested = LoadedOnce(made.found, made.name), False
        options = {
            "max_trajectory_tokens": self.max_prompt_tokens,
            "rollout_limits": RolloutLimits(max_turns=made.max_turns),
        }

        def episodes(size: int, groups_per_batch: int, num_batches: int, seed: int) -> ItemDataset[EnvGroupBuilder]:
            def group(number: int, key: tuple[int, int]) -> EnvGroupBuilder:
                return StepsGroupBuilder(
                    partial(steps_env, made.name),
                    size,
                    renderer,
                    made.name,
                    options,
                    source=source,
                    needs=made.needs,
                    number=number,
                    seed=derive_seed(seed, *key),
                )

            return ItemDataset(range(groups_per_batch * num_batches), group, groups_per_batch)

        training = episodes(self.group_size, self.groups_per_batch, self.num_batches, self.seed)
        tested = tested or made.only_evaluated
        return training, episodes(1, self.num_test, 1, derive_seed(self.seed, "test")) if tested else None
