"""A custom environment from the bare interfaces: a guessing game over two turns.

The env draws a secret number from 1 to 9. The model guesses, is told whether the secret is higher, and guesses again. Each turn's
reward is for a well-formed number and its distance from the secret. Four small classes make the env trainable: Env,
EnvGroupBuilder, RLDataset, RLDatasetBuilder. three_lines.py and ten_lines.py need less code. Run from the repository's root:

    python -m examples.custom_env
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence

import chz
import tinker

from tinker_cookbook.backends import check_command
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, RENDERER = "example_data/tiny_chat", "qwen3_instruct"


class GuessEnv(Env):
    """Two guesses at a secret number. An env plays one episode."""

    def __init__(self, renderer: Renderer, secret: int):
        self.renderer, self.secret = renderer, secret
        self.messages: list[Message] = [{"role": "user", "content": "Say a number from 1 to 9."}]
        self.turns = 0

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self.observe()

    def observe(self) -> tuple[Observation, StopCondition]:
        return self.renderer.build_generation_prompt(self.messages), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, _ = self.renderer.parse_response(action)
        words = get_text_content(message).strip(" .").split()
        guess = int(words[0]) if len(words) == 1 and words[0].isdecimal() else None
        reward = 0.0 if guess is None else 0.5 + 0.5 * max(0.0, 1 - abs(guess - self.secret) / 9)
        hint = "That is no number." if guess is None else "Higher." if guess < self.secret else "Not higher."
        self.turns += 1
        self.messages += [message, {"role": "user", "content": f"{hint} Say another number."}]
        observation, stop = self.observe()
        return StepResult(
            reward=reward,
            episode_done=self.turns == 2,
            next_observation=observation,
            next_stop_condition=stop,
            metrics={"is_number": float(guess is not None)},
        )


class GuessGroup(EnvGroupBuilder):
    """Several attempts at the same secret, whose rewards are compared with each other."""

    def __init__(self, renderer: Renderer, secret: int, size: int):
        self.renderer, self.secret, self.size = renderer, secret, size

    async def make_envs(self) -> Sequence[Env]:
        return [GuessEnv(self.renderer, self.secret) for _ in range(self.size)]

    def logging_tags(self) -> list[str]:
        return ["guess"]


class GuessDataset(RLDataset):
    """Batch i depends only on i, so a run resumes without replaying earlier batches."""

    def __init__(self, renderer: Renderer, batches: int, groups: int, group_size: int):
        self.renderer, self.batches, self.groups, self.group_size = renderer, batches, groups, group_size

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        rng = random.Random(index)
        return [GuessGroup(self.renderer, rng.randint(1, 9), self.group_size) for _ in range(self.groups)]

    def __len__(self) -> int:
        return self.batches


@chz.chz
class GuessDatasetBuilder(RLDatasetBuilder):
    batches: int = 6
    groups: int = 4
    group_size: int = 8

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = get_renderer(RENDERER, get_tokenizer(MODEL), model_name=MODEL)
        return GuessDataset(renderer, self.batches, self.groups, self.group_size), None


def main(log_path: str) -> None:
    config = train.Config(
        learning_rate=2e-3,
        dataset_builder=GuessDatasetBuilder(),
        model_name=MODEL,
        recipe_name="custom_env",
        max_tokens=8,
        log_path=log_path,
        on_zero_advantages="skip",
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    check_command()
    print(f"tinker {tinker.__version__}")
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    main(folder)
    print(f"Files: {folder}")
