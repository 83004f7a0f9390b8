"""A multi-turn environment in ten lines: the guessing game of custom_env.py, as a class that returns only the new messages.

three_lines.py shows the form for single questions. Run from the repository's root:

    python -m examples.ten_lines
"""

import asyncio
import random
import sys
import tempfile

from tinker_cookbook.backends import check_command
from tinker_cookbook.env import TurnResult, multi_turn_env
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl import train

MODEL = "tiny_chat"


class Guess:
    """Two guesses at a secret number. Each object plays one episode."""

    opening = "Say a number from 1 to 9."

    def __init__(self, rng: random.Random):
        self.secret, self.turns = rng.randint(1, 9), 0

    def step(self, message: Message) -> TurnResult:
        self.turns += 1
        text = get_text_content(message).strip(" .")
        guess = int(text) if text.isdecimal() and len(text) < 3 else None
        reward = 0.0 if guess is None else 0.5 + 0.5 * max(0.0, 1 - abs(guess - self.secret) / 9)
        hint = "That is no number." if guess is None else "Higher." if guess < self.secret else "Not higher."
        return TurnResult(f"{hint} Say another number.", reward, self.turns == 2, {"is_number": guess is not None})


def main(log_path: str) -> None:
    config = train.Config(
        dataset_builder=multi_turn_env(Guess).dataset_builder(MODEL, groups_per_batch=4, num_batches=6, num_test=8),
        model_name=MODEL,
        learning_rate=2e-3,
        max_tokens=8,
        recipe_name="ten_lines",
        log_path=log_path,
        on_zero_advantages="skip",
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    check_command()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    main(folder)
    print(f"Files: {folder}")
