"""Groups and datasets of message environments: say how one episode is drawn from a random generator, get the rest.

Subclass MessageDatasetBuilder with the fields of the game and `make_env_maker`. A group depends on the seed and its place alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import chz

from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.rl.item_dataset import ItemDataset
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv
from tinker_cookbook.rl.shared_prompt import SharedPrompt
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Record,
    RecordedMember,
    RLDataset,
    RLDatasetBuilder,
    TrajectoryGroup,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.seeds import derive_seed

EnvMaker = Callable[[Renderer, random.Random], Callable[[], MessageEnv]]
"""Draws an episode: gives a picklable function that makes its environment, a fresh one at each call."""


@dataclass(frozen=True)
class MessageGroupBuilder(EnvGroupBuilder):
    """`num_envs` attempts at the episode that `env_thunk` makes, each with a MessageEnv of its own.

    Pickles when the thunk does (functools.partial of a class or function) and the renderer came from get_renderer.
    """

    env_thunk: Callable[[], MessageEnv]
    num_envs: int
    renderer: Renderer
    dataset_name: str = "episodes"
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of EnvFromMessageEnv"""

    async def make_envs(self) -> Sequence[EnvFromMessageEnv]:
        envs = [EnvFromMessageEnv(self.renderer, self.env_thunk(), **self.options) for _ in range(self.num_envs)]
        prompt = SharedPrompt()
        for env in envs:
            env.shared_prompt = prompt
        return envs

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        records = []
        for i, (trajectory, env) in enumerate(zip(group.trajectories_G, env_group, strict=True)):
            assert isinstance(env, EnvFromMessageEnv)
            messages = [self.renderer.to_openai_message(message) for message in env.conversation]
            texts = [decode_tokens(self.renderer.tokenizer, turn.ac.tokens) for turn in trajectory.transitions]
            records.append(Record("episode", {"messages": messages}, [RecordedMember(i, "episode", texts)]))
        return records

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]


@chz.chz(typecheck=True)
class MessageDatasetBuilder(RLDatasetBuilder):
    """Training episodes, and as a test set `num_test` episodes drawn with another seed. Define `make_env_maker`."""

    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    groups_per_batch: int = chz.field(doc="episodes per batch, each played group_size times")
    group_size: int = chz.field(doc="attempts per episode")
    num_batches: int = chz.field(doc="training batches")
    num_test: int = chz.field(doc="episodes of an evaluation, each played once")
    seed: int = chz.field(doc="seed of the episodes")
    max_prompt_tokens: int | None = chz.field(
        default=None, doc="an episode ends whose prompt has grown beyond this; None: no limit"
    )

    async def make_env_maker(self) -> EnvMaker:
        """What draws the episodes. Clients that the environments need are made here."""
        raise NotImplementedError(f"{type(self).__name__} must define make_env_maker")

    def env_options(self) -> dict[str, Any]:
        """Further arguments of EnvFromMessageEnv."""
        return {}

    @property
    def dataset_name(self) -> str:
        return "episodes"

    def renderer(self) -> Renderer:
        return get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)

    async def __call__(self) -> tuple[RLDataset, RLDataset]:
        renderer, make_env = self.renderer(), await self.make_env_maker()
        options = {"max_trajectory_tokens": self.max_prompt_tokens, **self.env_options()}

        def episodes(num_envs: int, groups_per_batch: int, num_batches: int, seed: int) -> ItemDataset[EnvGroupBuilder]:
            def make_group(_: int, key: tuple[int, int]) -> EnvGroupBuilder:
                env = make_env(renderer, random.Random(derive_seed(seed, *key)))
                return MessageGroupBuilder(env, num_envs, renderer, self.dataset_name, options)

            return ItemDataset(range(groups_per_batch * num_batches), make_group, groups_per_batch)

        training = episodes(self.group_size, self.groups_per_batch, self.num_batches, self.seed)
        return training, episodes(1, self.num_test, 1, derive_seed(self.seed, "test"))
