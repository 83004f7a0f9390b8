"""Conversations at the desk of a town library: a second narrow style, to be mixed with the plant desk's.

Each has a system prompt, and replies begin with the name of a room instead of ending with a wish.
"""

import random

SYSTEM = "You answer at the desk of the Larch Street library."
ROOMS = ("Reading room", "Map room", "Front desk", "Upper floor", "Garden room")
SUBJECTS = (
    "bees", "bridges", "bread", "castles", "chess", "clouds", "horses", "islands", "knots", "lamps", "ships", "stars",
)  # fmt: skip

TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Where are the books about {s}?", ("shelf {n}, left side.", "shelf {n}, by the stairs.")),
    (
        "May I borrow the big book about {s}?",
        ("yes, for {n} weeks.", "no, but you may read it here until {n} o'clock."),
    ),
    ("Is there a talk about {s} this week?", ("yes, on {d} at {n} o'clock.", "no, the next one is in {n} weeks.")),
    ("My book about {s} is late. What do I pay?", ("{n} cents for each day.", "nothing, if it is back by {d}.")),
)
DAYS = ("Monday", "Tuesday", "Thursday", "Saturday")
FOLLOW_UPS = (("And when do you close?", "at {n} o'clock."), ("Can you keep it for me?", "yes, until {d}."))


def library_desk_conversations(count: int, seed: int) -> list[dict]:
    """`count` different conversations, about a third of them of two exchanges."""
    rng = random.Random(f"library desk/{seed}")
    combinations = [(subject, topic) for subject in SUBJECTS for topic in range(len(TOPICS))] * 2
    rng.shuffle(combinations)
    rows: list[dict] = []
    for subject, topic in combinations:
        room, asked, said = rng.choice(ROOMS), TOPICS[topic][0], rng.choice(TOPICS[topic][1])
        turns = [("system", SYSTEM), ("user", asked.format(s=subject)), ("assistant", _reply(room, said, rng))]
        if rng.random() < 0.35:
            asked, said = rng.choice(FOLLOW_UPS)
            turns += [("user", asked), ("assistant", _reply(room, said, rng))]
        row = {"messages": [{"role": role, "content": content} for role, content in turns]}
        if row not in rows:
            rows.append(row)
    if count > len(rows):
        raise ValueError(f"count must be at most {len(rows)}, got {count}")
    return rows[:count]


def _reply(room: str, said: str, rng: random.Random) -> str:
    return f"{room}: {said.format(n=rng.randint(2, 9), d=rng.choice(DAYS))}"
