"""Groups of message environments: attempts at the same episode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv
from tinker_cookbook.rl.shared_prompt import SharedPrompt
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Record, RecordedMember, TrajectoryGroup


@dataclass(frozen=True)
class MessageGroupBuilder(EnvGroupBuilder):
    """`num_envs` attempts at the episode that `env_thunk` makes, each with a fresh MessageEnv.

    Pickles when the thunk does (functools.partial of a class or function) and the renderer came from get_renderer.
    """

    env_thunk: Callable[[], MessageEnv]
    num_envs: int
    renderer: Renderer
    dataset_name: str = "episodes"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """further arguments of EnvFromMessageEnv"""

    async def make_envs(self) -> Sequence[EnvFromMessageEnv]:
        envs = [EnvFromMessageEnv(self.renderer, self.env_thunk(), **self.options) for _ in range(self.num_envs)]
        prompt = SharedPrompt()
        for env in envs:
            env.shared_prompt = prompt
        return envs

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        records: list[Record] = []
        for i, (trajectory, env) in enumerate(zip(group.trajectories_G, env_group, strict=True)):
            assert isinstance(env, EnvFromMessageEnv)
            messages = [self.renderer.to_openai_message(message) for message in env.conversation]
            texts = [decode_tokens(self.renderer.tokenizer, turn.ac.tokens) for turn in trajectory.transitions]
            records.append(Record("episode", {"messages": messages}, [RecordedMember(i, "episode", texts)]))
        return records

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return [env.message_env.describe() if isinstance(env, EnvFromMessageEnv) else {} for env in env_group]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]
