"""Conversations at the help desk of a plant nursery: one narrow style that the tiny model has not been trained on.

Fine-tuning on them visibly lowers the loss on held-out ones.
"""

import random

PLANTS = (
    "fern", "basil", "mint", "cactus", "orchid", "ivy", "rose", "tomato", "lavender", "lemon tree", "aloe", "violet",
)  # fmt: skip
SYSTEM = "You work at the plant desk of the Moss and Petal nursery."
BYE = "Happy growing!"

TOPICS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("How often do I water my {p}?", "When should I water the {p}?"),
        (
            "Water your {p} every {n} days, and let the soil dry a little.",
            "Give the {p} a cup of water every {n} days.",
        ),
    ),
    (
        ("Where should I put my {p}?", "How much light does a {p} need?"),
        ("Put the {p} near a {w} window, out of the wind.", "A {p} likes {n} hours of light at a {w} window."),
    ),
    (
        ("The leaves of my {p} are yellow.", "Why does my {p} have brown leaves?"),
        (
            "Your {p} gets too much water. Wait {n} days, then water less.",
            "Cut off those leaves and feed the {p} weekly.",
        ),
    ),
    (
        ("Does my {p} need a new pot?", "When do I repot the {p}?"),
        (
            "Repot your {p} in spring, in a pot {n} cm wider.",
            "Look at the roots of the {p}. If they are tight, repot it.",
        ),
    ),
    (
        ("My {p} has small flies.", "There are bugs on my {p}. What now?"),
        ("Wash the {p} with soapy water for {n} days.", "Let the soil of the {p} dry, and the bugs will leave."),
    ),
    (
        ("What do I feed my {p}?", "Does a {p} need plant food?"),
        ("Feed the {p} every {n} weeks while it grows.", "A spoon of plant food each month keeps a {p} strong."),
    ),
)
WINDOWS = ("south", "north", "east", "west")
THANKS = ("Thank you, I will try that.", "Great, thanks for the tip!", "That helps a lot.")
PARTINGS = ("Come back any time with your {p}. " + BYE, "I hope your {p} does well. " + BYE)


def plant_desk_conversations(count: int, seed: int) -> list[dict]:
    """`count` different conversations: some with a system prompt, some of two exchanges."""
    rng = random.Random(f"plant desk/{seed}")
    combinations = [(plant, topic) for plant in PLANTS for topic in range(len(TOPICS))] * 2
    rng.shuffle(combinations)
    rows: list[dict] = []
    asked_before: set[str] = set()
    for plant, topic in combinations:
        asked, answered = TOPICS[topic]
        question = rng.choice([q for q in asked if q.format(p=plant) not in asked_before]).format(p=plant)
        asked_before.add(question)
        answer = rng.choice(answered).format(p=plant, n=rng.randint(2, 9), w=rng.choice(WINDOWS))
        turns = [("user", question), ("assistant", f"{answer} {BYE}")]
        if rng.random() < 0.25:
            turns.insert(0, ("system", SYSTEM))
        if rng.random() < 0.3:
            turns += [("user", rng.choice(THANKS)), ("assistant", rng.choice(PARTINGS).format(p=plant))]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    if count > len(rows):
        raise ValueError(f"count must be at most {len(rows)}, got {count}")
    return rows[:count]
