"""The tasks of `recipes.anchors`: what each answers and pays, move by move."""

import asyncio
import random

import pytest

from recipes import anchors
from recipes.anchors import EPISODES, AlphabetSort, CLIConfig, ReverseText, Wordle, likeness, player
from recipes.warm_up import demonstrate
from tinker_cookbook.env import TurnResult, get_env, known_envs
from tinker_cookbook.env.episodes import EpisodeEnv
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_text_content


def say(episode: anchors.Anchor, text: str) -> TurnResult:
    return episode.step({"role": "assistant", "content": text})


def test_likeness_counts_the_longest_common_subsequence() -> None:
    assert likeness(["a", "b", "c"], ["a", "b", "c"]) == 1 and likeness(["x"], ["a"]) == 0
    # b d is common to both, of 3 and 4 words.
    assert likeness(["b", "a", "d"], ["b", "c", "d", "e"]) == pytest.approx(4 / 7)
    assert likeness([], ["a"]) == 0


def test_reverse_text() -> None:
    episode = ReverseText(random.Random(1))
    episode.words = ["apple", "door", "cloud"]
    right = say(episode, "cloud door apple")
    assert (right.reward, right.metrics) == (1, {"correct": 1.0}) and not right.messages
    assert say(episode, "apple door cloud").reward == pytest.approx(1 / 3)  # one word of three is in order


def test_alphabet_sort() -> None:
    episode = AlphabetSort(random.Random(0))
    episode.drawn = ["door", "apple", "garden", "bread"]
    first = say(episode, "apple door")
    assert (first.messages, first.reward) == ("And: garden", pytest.approx(1 / 3))
    second = say(episode, "apple garden door")
    assert (second.messages, second.reward) == ("And: bread", pytest.approx(2 / 9))
    last = say(episode, "apple bread door garden")
    assert not last.messages and last.reward == pytest.approx(1 / 3) and last.metrics == {"correct": 0.0}


class TestWordle:
    def test_a_letter_counts_as_often_as_the_word_has_it(self) -> None:
        assert Wordle.answer(list("bad"), "bad") == ["G", "G", "G"]
        assert Wordle.answer(list("dab"), "bad") == ["Y", "G", "Y"]
        assert Wordle.answer(list("fed"), "fad") == ["G", "X", "G"]
        assert Wordle.answer(list("ddd"), "fad") == ["X", "X", "G"]
        assert Wordle.answer(list("ddb"), "fad") == ["Y", "X", "X"]  # one d is in it, so one is answered
        assert Wordle.answer(["ba"], "bad") == ["X", "X", "X"]

    def test_a_win_pays_for_what_is_left(self) -> None:
        episode = Wordle(random.Random(0))
        episode.word = "fed"
        assert say(episode, "b a d").messages == "X X G"
        assert all(word.endswith("d") for word in episode.possible) and "fed" in episode.possible
        won = say(episode, "f e d")
        assert (won.reward, won.metrics) == (pytest.approx(1.25), {"correct": 1.0, "guesses": 2})

    def test_a_loss_pays_for_letters_in_place(self) -> None:
        episode = Wordle(random.Random(0))
        episode.word = "hag"
        results = [say(episode, "b a d") for _ in range(4)]
        assert [result.reward for result in results] == [0, 0, 0, pytest.approx(0.2 / 3)]
        assert results[-1].metrics["correct"] == 0.0 and not results[-1].messages

    def test_the_best_moves_win(self) -> None:
        for seed in range(12):
            episode = Wordle(random.Random(seed))
            result = TurnResult()
            while "correct" not in result.metrics:
                result = say(episode, " ".join(episode.best_move()))
            assert result.metrics["correct"] == 1.0


@pytest.mark.parametrize("name", EPISODES)
def test_who_shows_the_form_is_right_about_half_of_the_time(name: str) -> None:
    async def play(seed: int) -> list[str]:
        rng = random.Random(seed)
        episode = EPISODES[name](rng)
        conversation = await demonstrate(EpisodeEnv(episode), player(episode, rng))
        assert [message["role"] for message in conversation][:2] == ["user", "assistant"]
        assert len(conversation) <= 2 * episode.max_turns
        return [get_text_content(message) for message in conversation]

    games = [asyncio.run(play(seed)) for seed in range(40)]
    assert (len({game[0] for game in games}) == 1) == (name == "wordle")
    if name == "reverse_text":
        right = sum(game[1].split() == game[0].removeprefix("Reverse: ").split()[::-1] for game in games)
        assert 20 <= right <= 38  # half of them, and the shuffles that are right by chance


def test_they_are_environments_by_name() -> None:
    from recipes import rl

    assert rl.RECIPE and set(EPISODES) <= set(known_envs())
    env = get_env("wordle", {})
    assert type(env).__name__ == "MultiTurn"
    with pytest.raises(ConfigurationError, match="anchor='chess' is unknown"):
        CLIConfig(anchor="chess")
