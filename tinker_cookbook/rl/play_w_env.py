"""Playing an environment oneself: what the policy would read is printed, and what is typed is the policy's reply.

await play_env(EnvFromMessageEnv(renderer, GuessNumberEnv(...)), renderer.tokenizer)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Env, RLDatasetBuilder, Trajectory
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker


async def get_async_input(prompt: str, multiline: bool = False) -> str:
    """What is typed on the terminal, a line, or several up to an empty one; the event loop goes on meanwhile. Raises EOFError."""
    return await asyncio.to_thread(_typed, input, prompt, multiline)


def _typed(read_line: Callable[[str], str], prompt: str, multiline: bool) -> str:
    lines = [read_line(prompt)]
    while multiline and (line := read_line("")):
        lines.append(line)
    return "\n".join(lines)


class ManualPolicy(TokenCompleter):
    """A policy whose completions are typed. They have no logprobs, so they cannot be trained on.

    A reply ends with an empty line and gets the stop that the env asks for. Tags of special tokens may be typed out.

    Args:
        multiline: a reply goes on until an empty line; False: it is one line.
        show_observation: print what is new of each prompt.
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
        self._shown: list[int] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Raises EOFError when there is nothing more to read."""
        prompt = model_input.to_ints()
        new = prompt[len(self._shown) :] if prompt[: len(self._shown)] == self._shown else prompt
        if self._show_observation:
            self._console.print(decode_tokens(self._tokenizer, new))
        tokens, reason = encode_text(self._tokenizer, await asyncio.to_thread(self._read)), "stop"
        if max_tokens is not None and len(tokens) >= max_tokens:
            tokens, reason = tokens[:max_tokens], "length"
        elif stop:
            tokens += [stop[0]] if isinstance(stop[0], int) else encode_text(self._tokenizer, stop[0])
        self._shown = prompt + tokens
        return TokensWithLogprobs(tokens, None, reason)

    def _read(self) -> str:
        prompt = "your reply (end with an empty line): " if self._multiline else "your reply: "
        return _typed(self._read_line, prompt, self._multiline)


async def play_env(
    env: Env, tokenizer: Tokenizer, read_line: Callable[[str], str] = input, console: Console | None = None
) -> Trajectory:
    """Play one episode, within the env's own limits, and print what each turn was worth."""
    console = console or Console(highlight=False, markup=False)
    policy = ManualPolicy(tokenizer, read_line=read_line, console=console)
    trajectory = await run_rollout(policy, env)
    print_trajectory_summary(trajectory, console)
    return trajectory


def print_trajectory_summary(trajectory: Trajectory, console: Console | None = None) -> None:
    """Print what each turn was worth, and the whole episode."""
    console = console or Console(highlight=False, markup=False)
    for i, turn in enumerate(trajectory.transitions):
        console.print(f"turn {i + 1}: reward {turn.reward:g}  {turn.metrics}  {turn.logs or ''}")
    total = sum(turn.reward for turn in trajectory.transitions)
    console.print(f"total reward {total:g}, ended by: {trajectory.stop_reason}")


async def play_episode(builder: RLDatasetBuilder, tokenizer: Tokenizer) -> Trajectory:
    """Play the first training episode of a dataset; another seed of the dataset gives another one."""
    training, _ = await builder()
    group = training.get_batch(0)[0]
    try:
        env, *_ = await group.make_envs()
        return await play_env(env, tokenizer)
    finally:
        await group.cleanup()
