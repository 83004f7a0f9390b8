"""Play an environment yourself: the policy's prompt is printed, and you type its reply.

await play_env(EnvFromMessageEnv(renderer, GuessNumberEnv(...)), renderer.tokenizer)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import media
from tinker_cookbook.renderers.decoding import encode_text
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Env, RLDatasetBuilder, Trajectory
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker


async def get_async_input(prompt: str, multiline: bool = False) -> str:
    """Read a line from the terminal, or several lines up to an empty one, without blocking the event loop. Raises
    EOFError.
    """
    return await asyncio.to_thread(_typed, input, prompt, multiline)


def _typed(read_line: Callable[[str], str], prompt: str, multiline: bool) -> str:
    lines = [read_line(prompt)]
    while multiline and (line := read_line("")):
        lines.append(line)
    return "\n".join(lines)


class ManualPolicy(TokenCompleter):
    """A policy whose completions you type. They have no logprobs, so they cannot be trained on.

    A reply ends with an empty line and gets the env's stop sequence. You can write out the tags of special
    tokens.

    Args:
        multiline: read until an empty line; False: read one line.
        show_observation: print the new part of each prompt.
        read_line: asks for a line, given a prompt; raises EOFError at the end of input.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        multiline: bool = True,
        show_observation: bool = True,
        read_line: Callable[[str], str] = input,
        console: Console | None = None,
    ):
        self._tokenizer, self._read_line = tokenizer, read_line
        self._multiline, self._show_observation = multiline, show_observation
        self._console = console or Console(highlight=False, markup=False)
        self._shown: list[media.Element] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Raises EOFError at the end of input."""
        prompt = media.elements(model_input)
        new = prompt[len(self._shown) :] if prompt[: len(self._shown)] == self._shown else prompt
        if self._show_observation:
            self._console.print(media.decode(new, self._tokenizer))
        tokens, reason = encode_text(self._tokenizer, await asyncio.to_thread(self._read)), "stop"
        if max_tokens is not None and len(tokens) >= max_tokens:
            tokens, reason = tokens[:max_tokens], "length"
        elif stop:
            tokens += [stop[0]] if isinstance(stop[0], int) else encode_text(self._tokenizer, stop[0])
        self._shown = [*prompt, *tokens]
        return TokensWithLogprobs(tokens, None, reason)

    def _read(self) -> str:
        prompt = "your reply (end with an empty line): " if self._multiline else "your reply: "
        return _typed(self._read_line, prompt, self._multiline)


async def play_env(
    env: Env, tokenizer: Tokenizer, read_line: Callable[[str], str] = input, console: Console | None = None
) -> Trajectory:
    """Play one episode within the env's limits, and print the reward of each turn."""
    console = console or Console(highlight=False, markup=False)
    policy = ManualPolicy(tokenizer, read_line=read_line, console=console)
    trajectory = await run_rollout(policy, env)
    print_trajectory_summary(trajectory, console)
    return trajectory


def print_trajectory_summary(trajectory: Trajectory, console: Console | None = None) -> None:
    """Print the reward of each turn and of the whole episode."""
    console = console or Console(highlight=False, markup=False)
    for i, turn in enumerate(trajectory.transitions):
        console.print(f"turn {i + 1}: reward {turn.reward:g}  {turn.metrics}  {turn.logs or ''}")
    total = sum(turn.reward for turn in trajectory.transitions)
    console.print(f"total reward {total:g}, ended by: {trajectory.stop_reason}")


async def play_episode(builder: RLDatasetBuilder, tokenizer: Tokenizer) -> Trajectory:
    """Play the first training episode of a dataset; change the dataset's seed for another one."""
    training, _ = await builder()
    group = training.get_batch(0)[0]
    try:
        env, *_ = await group.make_envs()
        return await play_env(env, tokenizer)
    finally:
        await group.cleanup()
