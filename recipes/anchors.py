"""Tasks by which libraries are compared, in miniature: reverse_text, alphabet_sort and wordle, SFT then RL.

The tasks have the names and the form of those for which prime-rl and tinker-cookbook publish curves. Texts are a few words
here, and words a few letters, so that the shipped model can learn them in two minutes; the numbers of the two are not comparable.

    python -m recipes.anchors
    python -m recipes.anchors anchor=wordle
    python -m recipes.anchors anchor=alphabet_sort model_name=Qwen/Qwen3-4B-Instruct-2507 warm_up_steps=0
    python -m recipes.sweep recipe=recipes.anchors grid.anchor=reverse_text,wordle seeds=0,1,2 processes=0

`python -m recipes.rl env=wordle` plays them too, without the supervised stage. Arithmetic, the fourth of these tasks, is
`python -m recipes.rl_basic`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import chz

from recipes.common import for_model
from recipes.rl_common import dataset_of
from recipes.warm_up import GameConfig, demonstrate, play_or_train
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env import TurnResult, multi_turn_env
from tinker_cookbook.env.episodes import EpisodeEnv
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "anchors"
WORDS: tuple[str, ...] = ("apple", "bread", "cloud", "door", "engine", "flower", "garden", "house")
CARELESS = 0.5
"""How often the player of the supervised stage moves at random, in the right form."""


def likeness(reply: Sequence[str], wanted: Sequence[str]) -> float:
    """2 L / (len(reply) + len(wanted)), L the length of the longest common subsequence of two lists of words: 1 for equal
    ones, 0 for none in common.
    """
    row = [0] * (len(wanted) + 1)
    for word in reply:
        before = row[:]
        for i, other in enumerate(wanted, start=1):
            row[i] = before[i - 1] + 1 if word == other else max(before[i], row[i - 1])
    return 2 * row[-1] / max(1, len(reply) + len(wanted))


def words_of(message: Message) -> list[str]:
    return get_text_content(message).split()


class Anchor(ABC):
    """An episode, and the player that demonstrates its format. `opening` is its first message."""

    tiny_steps: int
    """of the supervised stage on the shipped model"""
    max_turns: int
    opening: str

    @abstractmethod
    def __init__(self, rng: random.Random) -> None: ...

    @abstractmethod
    def step(self, message: Message) -> TurnResult:
        """Answer a reply."""

    @abstractmethod
    def best_move(self) -> list[str]:
        """The right reply, in words."""

    @abstractmethod
    def careless_move(self, rng: random.Random) -> list[str]:
        """Words in the right form, at random."""


class ReverseText(Anchor):
    """Words to write in the other order. The reward is the similarity of the reply to the right one."""

    tiny_steps, max_turns = 240, 1

    def __init__(self, rng: random.Random) -> None:
        self.words = rng.sample(WORDS, rng.randint(2, 3))
        self.opening = f"Reverse: {' '.join(self.words)}"

    def step(self, message: Message) -> TurnResult:
        reply, wanted = words_of(message), self.best_move()
        return TurnResult(reward=likeness(reply, wanted), metrics={"correct": float(reply == wanted)})

    def best_move(self) -> list[str]:
        return self.words[::-1]

    def careless_move(self, rng: random.Random) -> list[str]:
        return rng.sample(self.words, len(self.words))


class AlphabetSort(Anchor):
    """Three turns: two words to sort, then one more at a time to sort in. Each turn's similarity counts a third."""

    tiny_steps, max_turns = 160, 3

    def __init__(self, rng: random.Random) -> None:
        self.drawn = rng.sample(WORDS, 2 + self.max_turns - 1)
        self.known = 2
        self.right = 0
        self.opening = f"Sort: {' '.join(self.drawn[:2])}"

    def step(self, message: Message) -> TurnResult:
        reply, wanted = words_of(message), self.best_move()
        reward = likeness(reply, wanted) / self.max_turns
        self.right += reply == wanted
        if self.known == len(self.drawn):
            return TurnResult(reward=reward, metrics={"correct": float(self.right == self.max_turns)})
        self.known += 1
        return TurnResult(f"And: {self.drawn[self.known - 1]}", reward)

    def best_move(self) -> list[str]:
        return sorted(self.drawn[: self.known])

    def careless_move(self, rng: random.Random) -> list[str]:
        return rng.sample(self.drawn[: self.known], self.known)


class Wordle(Anchor):
    """A word of three letters out of twelve, and four guesses. Each is answered letter by letter: G where it is right, Y where
    the word has it elsewhere, else X.

    The reward is 1 for the word, plus 0.5 times the share of guesses that are left; without it 0.2 times the share of
    right letters in the last guess.
    """

    tiny_steps, max_turns = 240, 4
    words: tuple[str, ...] = ("bad", "bag", "bed", "beg", "cab", "dab", "fab", "fad", "fed", "gab", "had", "hag")

    def __init__(self, rng: random.Random) -> None:
        self.word = rng.choice(self.words)
        self.possible = list(self.words)
        self.turns = 0
        self.opening = "Guess the word."

    def step(self, message: Message) -> TurnResult:
        guess = words_of(message)
        answer = self.answer(guess, self.word)
        self.turns += 1
        self.possible = [word for word in self.possible if self.answer(guess, word) == answer]
        won = guess == list(self.word)
        if won or self.turns == self.max_turns:
            left = (self.max_turns - self.turns) / self.max_turns
            reward = 1 + 0.5 * left if won else 0.2 * answer.count("G") / len(self.word)
            return TurnResult(reward=reward, metrics={"correct": float(won), "guesses": self.turns})
        return TurnResult(" ".join(answer))

    @staticmethod
    def answer(guess: Sequence[str], word: str) -> list[str]:
        """G, Y or X for each letter of the word's length; a letter counts once for each time that the word has it. A guess of
        another length gets X throughout.
        """
        if len(guess) != len(word):
            return ["X"] * len(word)
        rest = [letter for letter, of_guess in zip(word, guess, strict=True) if letter != of_guess]
        marks: list[str] = []
        for letter, of_guess in zip(word, guess, strict=True):
            if letter == of_guess:
                marks.append("G")
            elif of_guess in rest:
                rest.remove(of_guess)
                marks.append("Y")
            else:
                marks.append("X")
        return marks

    def best_move(self) -> list[str]:
        return list(self.possible[0])

    def careless_move(self, rng: random.Random) -> list[str]:
        return list(rng.choice(self.words))


EPISODES: dict[str, type[Anchor]] = {"reverse_text": ReverseText, "alphabet_sort": AlphabetSort, "wordle": Wordle}


@chz.chz(typecheck=True)
class CLIConfig(GameConfig, max_steps=24, groups_per_batch=16):
    """Keys of `python -m recipes.anchors`."""

    anchor: str = chz.field(default="reverse_text", doc=f"the task: {', '.join(EPISODES)}")

    @chz.validate
    def _check_anchor(self) -> None:
        if self.anchor not in EPISODES:
            raise ConfigurationError(f"anchor={self.anchor!r} is unknown; use {', '.join(EPISODES)}")


def player(episode: Anchor, rng: random.Random) -> Callable[[list[Message]], Message]:
    """Moves of a player who knows the format and is right half of the time."""

    def move(_: list[Message]) -> Message:
        words = episode.careless_move(rng) if rng.random() < CARELESS else episode.best_move()
        return {"role": "assistant", "content": " ".join(words)}

    return move


async def main(cli: CLIConfig) -> RunSummary | None:
    cli = for_model(cli)
    kind = EPISODES[cli.anchor]

    async def careless_game(renderer: Renderer, rng: random.Random) -> list[Message]:
        episode = kind(rng)
        return await demonstrate(EpisodeEnv(episode), player(episode, rng))

    episodes, metrics = dataset_of(cli, multi_turn_env(kind)), ["reward/total", "correct"]
    return await play_or_train(cli, RECIPE, episodes, careless_game, metrics, [cli.anchor], kind.tiny_steps)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
