"""A problem with a checkable answer: its prompt, its reward, and what counts as well formed."""

import asyncio
import pickle
from functools import partial

import pytest

from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")
RENDERER = get_renderer("qwen3_instruct", get_tokenizer(TINY), model_name=TINY)
PREFIX: list[Message] = [{"role": "system", "content": "Answer as =N."}]


class SumEnv(ProblemEnv):
    """7 + 5, to be answered as =12."""

    def get_question(self) -> str:
        return "7 + 5"

    def check_format(self, sample_str: str) -> bool:
        return sample_str.startswith("=")

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.removeprefix("=") == "12"

    def get_reference_answer(self) -> str:
        return "12"


def speech(text: str, stopped: bool = True) -> TokensWithLogprobs:
    ids = RENDERER.tokenizer.encode(text, add_special_tokens=False)
    stop = RENDERER.get_stop_sequences()[0]
    assert isinstance(stop, int)
    return said([*ids, stop] if stopped else ids, "stop" if stopped else "length")


def attempt(builder: ProblemGroupBuilder, *replies: TokensWithLogprobs):
    policy = ScriptedCompleter({i: [reply] for i, reply in enumerate(replies)})
    return asyncio.run(do_group_rollout(pickle.loads(pickle.dumps(builder)), policy)), policy.heard


@pytest.mark.parametrize(
    ("reply", "options", "well_formed", "correct", "reward"),
    [
        (speech("=12"), {}, 1, 1, 1.0),
        (speech("12"), {}, 0, 1, 0.9),
        (speech("=13"), {}, 1, 0, 0.0),
        (speech("13"), {}, 0, 0, -0.1),
        (speech("=12", stopped=False), {}, 0, 1, 0.9),
        (speech("=12", stopped=False), {"require_stop_sequence_for_format": False}, 0, 1, 0.9),
        (speech("12"), {"format_coef": 0.5}, 0, 1, 0.5),
    ],
)
def test_reward_is_format_coef_times_format_less_one_plus_correct(reply, options, well_formed, correct, reward) -> None:
    group, _ = attempt(ProblemGroupBuilder(partial(SumEnv, RENDERER, **options), 1), reply)
    (transition,) = group.trajectories_G[0].transitions
    assert transition.reward == pytest.approx(reward)
    assert transition.metrics == {"format": well_formed, "correct": correct, "stop/completed": 1}


@pytest.mark.parametrize(
    ("end", "required", "well_formed"),
    [
        ("\n\nUser:", True, 1),
        ("\n\nUser:", False, 1),
        ("<|im_end|>", True, 0),
        ("<|im_end|>", False, 1),
        ("", False, 0),
    ],
)
def test_the_end_of_text_is_not_the_stop_sequence_and_a_reply_without_either_has_no_format(
    end: str, required: bool, well_formed: int
) -> None:
    """In role_colon a reply may end with the next speaker's name, its stop sequence, or with the end-of-text token."""
    renderer = get_renderer("role_colon", get_tokenizer(TINY), model_name=TINY)
    reply = said(renderer.tokenizer.encode(f"=12{end}", add_special_tokens=False), "stop" if end else "length")
    env = partial(SumEnv, renderer, require_stop_sequence_for_format=required)
    group, _ = attempt(ProblemGroupBuilder(env, 1), reply)
    (transition,) = group.trajectories_G[0].transitions
    assert transition.metrics["format"] == well_formed and transition.metrics["correct"] == 1
    assert transition.reward == pytest.approx(0.9 + 0.1 * well_formed)


def test_the_prompt_is_the_prefix_and_the_question() -> None:
    _, heard = attempt(ProblemGroupBuilder(partial(SumEnv, RENDERER, PREFIX), 1), speech("=12"))
    messages: list[Message] = [*PREFIX, {"role": "user", "content": "7 + 5"}]
    assert heard[0] == [RENDERER.build_generation_prompt(messages).to_ints()]
