"""A person in the policy's place: what is typed becomes ids with the env's stop, and only what is new is shown."""

import asyncio
import io
from collections.abc import Callable

import pytest
import tinker
from rich.console import Console

from tests.debate.arena import RENDERERS, make_renderer, reply_ids
from tests.rl.test_message_env import EchoEnv
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.play_w_env import ManualPolicy, play_env
from tinker_cookbook.rl.rollout_limits import RolloutLimits


def typist(*lines: str) -> Callable[[str], str]:
    waiting = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    return read


def screen() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=200, highlight=False, markup=False), shown


@pytest.mark.parametrize("name", RENDERERS)
def test_an_episode_by_hand(name: str) -> None:
    renderer = make_renderer(name)
    console, shown = screen()
    env = EnvFromMessageEnv(renderer, EchoEnv(2))
    trajectory = asyncio.run(play_env(env, renderer.tokenizer, typist("one", "", "two", "lines", ""), console))
    assert [turn.ac.tokens for turn in trajectory.transitions] == [
        reply_ids(renderer, "one"),
        reply_ids(renderer, "two\nlines"),
    ]
    assert trajectory.transitions[0].ac.maybe_logprobs is None
    text = shown.getvalue()
    assert text.count("begin") == 1 and text.count("go on") == 1
    assert "turn 2: reward 2" in text and "total reward 3, ended by: completed" in text


def test_a_reply_longer_than_allowed_is_cut_off() -> None:
    renderer = make_renderer("qwen3_instruct")
    policy = ManualPolicy(renderer.tokenizer, read_line=typist("one two three", ""), console=screen()[0])
    stop = renderer.get_stop_sequences()
    reply = asyncio.run(policy(tinker.ModelInput.from_ints([1]), stop, max_tokens=2))
    assert reply.tokens == reply_ids(renderer, "one two three")[:2] and reply.stop_reason == "length"


def test_a_reply_may_be_one_line_and_the_prompt_left_out() -> None:
    renderer = make_renderer("qwen3_instruct")
    console, shown = screen()
    policy = ManualPolicy(renderer.tokenizer, False, False, read_line=typist("one", "two"), console=console)
    reply = asyncio.run(policy(tinker.ModelInput.from_ints([1]), renderer.get_stop_sequences()))
    assert reply.tokens == reply_ids(renderer, "one") and shown.getvalue() == ""


def test_limits_hold_for_people_too() -> None:
    renderer = make_renderer("qwen3_instruct")
    env = EnvFromMessageEnv(renderer, EchoEnv(9), rollout_limits=RolloutLimits(max_turns=1))
    trajectory = asyncio.run(play_env(env, renderer.tokenizer, typist("one", "", "two", ""), screen()[0]))
    assert trajectory.stop_reason == "max_turns"


def test_the_end_of_input_ends_the_game() -> None:
    renderer = make_renderer("qwen3_instruct")
    with pytest.raises(EOFError):
        asyncio.run(play_env(EnvFromMessageEnv(renderer, EchoEnv()), renderer.tokenizer, typist("one"), screen()[0]))
