"""An environment in three lines: questions, and a function that scores the replies.

ten_lines.py has several turns, custom_env.py implements the full interface. Run from the repository's root:

    python -m examples.three_lines
"""

import asyncio
import sys
import tempfile

from tinker_cookbook.backends import check_command
from tinker_cookbook.env import single_turn_env
from tinker_cookbook.rl import train

MODEL = "tiny_chat"
ROWS = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(10) for b in range(10)]


def reward(question: str, reply: str, answer: str) -> tuple[float, dict[str, float]]:
    """0.5 for writing a sum, 0.5 for naming the right number; with the metric `is_sum`."""
    return 0.5 * ("+" in reply) + 0.5 * (answer in reply), {"is_sum": float("+" in reply)}


SUMS = single_turn_env(ROWS, reward)


def main(log_path: str) -> None:
    config = train.Config(
        dataset_builder=SUMS.dataset_builder(MODEL, num_batches=8),
        model_name=MODEL,
        learning_rate=2e-3,
        max_tokens=16,
        recipe_name="three_lines",
        log_path=log_path,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    check_command()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    main(folder)
    print(f"Files: {folder}")
