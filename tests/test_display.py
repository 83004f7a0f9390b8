"""What people are shown: the trained tokens of an example in their own colour, and the turns of an episode."""

import re

import pytest
import tinker
import torch

from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers.datum_text import colorize_example, example_text, to_ints
from tinker_cookbook.renderers.renderer import text_chunk
from tinker_cookbook.rl.trajectory_text import format_trajectory, one_example
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.supervised.common import datum_from_model_input_weights

GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special_tokens=False)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def example(asked: str = "ask", answered: str = "tell") -> tinker.Datum:
    tokens, weights = [*ids(asked), *ids(answered)], [0.0] * len(ids(asked)) + [0.5] * len(ids(answered))
    return datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), torch.tensor(weights))


def test_trained_tokens_are_green_and_all_others_yellow() -> None:
    shown = colorize_example(example(), make_tokenizer())
    assert f"{YELLOW}ask" in shown and f"{GREEN}tell" in shown and RED not in shown
    assert plain(shown) == "asktell"


def test_negative_advantages_are_red() -> None:
    datum = example()
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    advantages = torch.zeros(len(targets))
    advantages[-len(ids("tell")) :] = -1.0
    datum = tinker.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "advantages": tinker.TensorData.from_torch(advantages),
        },
    )
    assert f"{RED}tell" in colorize_example(datum, make_tokenizer(), key="advantages")
    with pytest.raises(
        DataValidationError, match=r"no 'weights'; its loss_fn_inputs are \['advantages', 'target_tokens'\]"
    ):
        colorize_example(datum, make_tokenizer())


def test_markup_and_long_lines_are_shown_as_they_are() -> None:
    answer = "[red]not markup[/red] " + "long " * 60 + "\nend"
    assert plain(colorize_example(example("Q: ", answer), make_tokenizer())) == "Q: " + answer


def test_a_long_example_is_cut_and_says_so() -> None:
    datum = example("a", "b" * 50)
    total = datum.model_input.length + 1
    assert example_text(datum, make_tokenizer(), max_tokens=4).plain.endswith(f"\n... ({total - 4} more tokens)")
    assert "more tokens" not in example_text(datum, make_tokenizer(), max_tokens=total).plain


def test_several_numbers_per_position_cannot_be_shown() -> None:
    datum = example()
    n = datum.model_input.length
    wide = {key: tinker.TensorData.from_torch(torch.ones(n, 2)) for key in ("target_tokens", "weights")}
    with pytest.raises(DataValidationError, match="one number per position can be shown"):
        colorize_example(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=wide), make_tokenizer())


def test_media_positions_are_zeros() -> None:
    image = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=2)
    chunk = text_chunk([5, 6])
    assert chunk is not None
    assert to_ints(tinker.ModelInput(chunks=[chunk, image])) == [5, 6, 0, 0]
    assert (to_ints(chunk), to_ints(image)) == ([5, 6], [0, 0])


def test_a_trajectory_tells_what_was_seen_done_and_got() -> None:
    turns = [
        Transition(
            tinker.ModelInput.from_ints(ids(f"see{n}")),
            TokensWithLogprobs(ids(f"do{n}"), [-1.0] * len(ids(f"do{n}"))),
            reward=n / 2,
            episode_done=n == 1,
            metrics={"correct": n},
        )
        for n in range(2)
    ]
    trajectory = Trajectory(turns, tinker.ModelInput.empty())
    shown = format_trajectory(trajectory, make_tokenizer())
    assert f"{YELLOW}see0" in shown and f"{GREEN}do1" in shown
    lines = plain(shown).splitlines()
    assert lines[3:5] == ["do0", "--- turn 0: reward 0, correct 0"]
    assert lines[-1] == "--- turn 1: reward 0.5, correct 1, done"
    last = plain(format_trajectory(trajectory, make_tokenizer(), only_last_transition=True))
    assert "see0" not in last and last.startswith("--- turn 1: observation")


def test_an_example_has_question_reply_answer_and_reward() -> None:
    def trajectory(reply: str, reward: float) -> Trajectory:
        tokens = TokensWithLogprobs(ids(reply), [-1.0] * len(ids(reply)))
        turn = Transition(tinker.ModelInput.from_ints(ids("prompt")), tokens, reward, episode_done=True, metrics={})
        return Trajectory([turn], tinker.ModelInput.empty())

    about = [{"question": "2 + 2?", "ground_truth": "4"}] * 2
    replies = [trajectory("", 0.0), trajectory("five\n" + "x" * 400, 0.25)]
    group = TrajectoryGroup(replies, [0.0, 0.5], [{}, {}], member_info_G=about)
    shown = one_example([group], make_tokenizer())
    reply = ("five\\n" + "x" * 400)[:300]
    told = f"  question: 2 + 2?\n  reply: {reply}...\n  answer: 4\n  reward: 0.75 (its group: 0 0.75)"
    assert shown == f"For example:\n{told}"
    unknown = one_example([TrajectoryGroup(replies[1:], [0.0], [{}])], make_tokenizer())
    assert unknown is not None and "question: prompt\n" in unknown and "answer" not in unknown
    assert one_example([TrajectoryGroup(replies[:1], [0.0], [{}])], make_tokenizer()) is None
