"""Labeled comparisons at the plant desk: a helpful reply is better than an unhelpful one, two of a kind are a tie.

The difference is one of words, which even a model as small as tiny_chat can learn to detect, to judge and to prefer.
"""

import random

from tools.make_tiny_model.plant_desk import BYE, PLANTS, TOPICS, WINDOWS

UNHELPFUL = (
    "I do not know.",
    "No idea, sorry.",
    "That is not my job.",
    "Maybe. Look it up.",
    "Ask someone else about your {p}.",
)
TIES_PER_THOUSAND = 60


def plant_desk_comparisons(count: int, seed: int) -> list[dict]:
    """`count` comparisons about different questions, the better reply at A as often as at B."""
    rng = random.Random(f"plant desk comparisons/{seed}")
    asked = [
        (plant, topic, i) for plant in PLANTS for topic in range(len(TOPICS)) for i in range(len(TOPICS[topic][0]))
    ]
    if count > len(asked):
        raise ValueError(f"count must be at most {len(asked)}, got {count}")
    rng.shuffle(asked)
    return [_comparison(plant, *TOPICS[topic], i, rng) for plant, topic, i in asked[:count]]


def _comparison(plant: str, questions: tuple[str, ...], answers: tuple[str, ...], i: int, rng: random.Random) -> dict:
    helpful = [f"{text.format(p=plant, n=rng.randint(2, 9), w=rng.choice(WINDOWS))} {BYE}" for text in answers]
    rng.shuffle(helpful)
    unhelpful = rng.choice(UNHELPFUL).format(p=plant)
    label = rng.choice("AB")
    if rng.randrange(1000) < TIES_PER_THOUSAND:
        label, replies = "Tie", helpful
    else:
        replies = [helpful[0], unhelpful] if label == "A" else [unhelpful, helpful[0]]
    reply_a, reply_b = ([{"role": "assistant", "content": text}] for text in replies)
    question = {"role": "user", "content": questions[i].format(p=plant)}
    comparison = {"prompt_conversation": [question], "completion_A": reply_a, "completion_B": reply_b}
    return {"comparison": comparison, "label": label}
