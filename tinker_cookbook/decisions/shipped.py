"""Questions whose probabilities are known: draws from a bag of marbles, and rain after days of rain."""

import random
from datetime import date, timedelta
from itertools import product
from typing import Any

from tinker_cookbook.utils.seeds import derive_seed

COLOURS = ("red", "blue")
MOST_MARBLES = 9
"""Most marbles of a colour in a bag."""
DRAWS = 40
"""Training rows per bag, each with a drawn outcome."""
HELD_OUT = 5
"""One bag in HELD_OUT is held out."""

TOWNS = ("Larkfield", "Mossby", "Fenwick", "Ostley", "Quarne", "Tillham", "Brackwater", "Suncote")
WINDOW = 10
"""Days of history in a question about rain."""
FIRST_DAY = date(2024, 1, 1)
DAYS = 500


def marbles() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bags of marbles: training rows have the colour that was drawn, held-out rows, about other bags, the probabilities."""
    rng = random.Random(derive_seed("marbles"))
    bags = list(product(range(1, MOST_MARBLES + 1), repeat=len(COLOURS)))
    rng.shuffle(bags)
    train: list[dict[str, Any]] = []
    test: list[dict[str, Any]] = []
    for i, bag in enumerate(bags):
        counts = ", ".join(f"{count} {colour}" for count, colour in zip(bag, COLOURS, strict=True))
        row = {"question": f"{counts} marbles. Which is drawn?", "choices": [*COLOURS]}
        if i % HELD_OUT == 0:
            test.append({**row, "probabilities": [count / sum(bag) for count in bag]})
        else:
            train += [{**row, "outcome": rng.choices(COLOURS, bag)[0]} for _ in range(DRAWS)]
    rng.shuffle(train)
    return train, test


def rain() -> list[dict[str, Any]]:
    """Forecasts of rain, by date: how many of the last days were wet, and whether the next one is; its probability is known.

    With k of the last WINDOW days wet, the next day is wet with probability (k + 1) / (WINDOW + 2).
    """
    rows: list[dict[str, Any]] = []
    for town in TOWNS:
        rng = random.Random(derive_seed("rain", town))
        wet = [rng.random() < 0.5 for _ in range(WINDOW)]
        for day in range(DAYS):
            count = sum(wet[-WINDOW:])
            probability = (count + 1) / (WINDOW + 2)
            wet.append(rng.random() < probability)
            asked = FIRST_DAY + timedelta(days=day)
            question = f"{town}: {count} of the last {WINDOW} days were wet. Rain tomorrow?"
            rows.append(
                {"question": question, "date": asked.isoformat(), "outcome": wet[-1], "probability": probability}
            )
    return sorted(rows, key=lambda row: row["date"])
