"""Small made-up data in the form of the public datasets that the recipes load, and the questions behind them.

Nothing of the library is imported: recipes also run here on the library that they come with.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONVERSATIONS = Path(__file__).parents[2] / "example_data" / "conversations.jsonl"

Rows = list[dict[str, Any]]

ANIMALS = ("cat", "dog", "horse", "owl", "bee", "frog", "crab", "wolf")
CHOICES = ("A", "B", "C", "D")


def sums(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Word problems with their answers, which are mostly 3: a policy that has found that out gets better at once."""
    rng = random.Random(seed)
    pairs = [
        (rng.randint(0, 3), 3) if rng.random() < 0.7 else (rng.randint(0, 4), rng.randint(4, 8)) for _ in range(count)
    ]
    return [(f"Ann has {a} pears and gets {b - a} more. How many pears has Ann?", b) for a, b in pairs]


def facts(count: int) -> list[tuple[str, str]]:
    """Questions to look up with the words that answer them."""
    return [(f"Which animal lives in house {i}?", ANIMALS[i % len(ANIMALS)]) for i in range(count)]


def exercises(count: int) -> list[tuple[str, list[str], str]]:
    """Questions with four choices and the letter of the right one."""
    rng = random.Random(1)
    return [
        (f"Which number is {n}?", [str(n + shift - right) for shift in range(4)], CHOICES[right])
        for n, right in ((rng.randint(5, 20), rng.randrange(4)) for _ in range(count))
    ]


def _conversations(count: int) -> Rows:
    shipped = [json.loads(line)["messages"] for line in CONVERSATIONS.read_text().splitlines() if line.strip()]
    return [{"messages": shipped[i % len(shipped)]} for i in range(count)]


def _gsm8k(count: int, seed: int) -> Rows:
    return [{"question": q, "answer": f"Add the pears.\n#### {a}"} for q, a in sums(count, seed)]


def _preferences(count: int) -> Rows:
    asked = [f"\n\nHuman: My plant number {i} looks sick.\n\nAssistant: " for i in range(count)]
    return [{"chosen": f"{q}Give it water.", "rejected": f"{q}I do not know, ask somebody else."} for q in asked]


def _reasoning(count: int) -> Rows:
    return [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": f"It is {a}."}]}
        for q, a in sums(count)
    ]


def _science(count: int) -> Rows:
    return [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": question,
            "choices": {"label": list(CHOICES), "text": texts},
            "answerKey": letter,
        }
        for question, texts, letter in exercises(count)
    ]


def _encyclopedia() -> Rows:
    sentence = "The {} was built before the war , and after it the town grew around it while the river changed . "
    return [{"text": sentence.format(animal) * 40} for animal in ANIMALS * 4]


def _graded(count: int) -> Rows:
    scale = {f"orig_score{i}_description": f"{i} of 5" for i in range(1, 6)}
    return [
        {"orig_instruction": q, "orig_criteria": "Is it right?", "orig_reference_answer": f"It is {a}.", **scale}
        for q, a in sums(count)
    ]


def forecast_lines(count: int = 24) -> list[str]:
    """Questions about the future as a CSV file, half of them before the day that the recipe splits at."""
    columns = "submission_id,event_ticker,title,snapshot_time,close_time,market_outcome,category,markets,sources"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for i in range(count):
        month, animal = ("09" if i % 2 else "11"), ANIMALS[i % len(ANIMALS)]
        times = [f"2025-{month}-{day}T00:00:00+00:00" for day in ("02", "09")]
        sources = json.dumps([{"title": "News", "summary": f"The {animal} is fast.", "ranking": 1}])
        outcome, markets = json.dumps({"Yes": i % 3 % 2}), json.dumps(["Yes"])
        writer.writerow(
            [f"s{i}", f"E{i}", f"Does the {animal} win race {i}?", *times, outcome, "Sports", markets, sources]
        )
    return [columns, *text.getvalue().splitlines()]


DATASETS: dict[str, dict[str, Callable[[], Rows]]] = {
    "HuggingFaceH4/no_robots": {"train": lambda: _conversations(256), "test": lambda: _conversations(8)},
    "openai/gsm8k": {"train": lambda: _gsm8k(160, 0), "test": lambda: _gsm8k(8, 1)},
    "Anthropic/hh-rlhf": {"train": lambda: _preferences(256), "test": lambda: _preferences(8)},
    "open-thoughts/OpenThoughts3-1.2M": {"train": lambda: _reasoning(64)},
    "zwhe99/DeepMath-103K": {"train": lambda: [{"question": q, "final_answer": str(a)} for q, a in sums(64)]},
    "allenai/tulu-3-sft-mixture": {"train": lambda: _conversations(64)},
    "Salesforce/wikitext": {"train": _encyclopedia},
    "HuggingFaceH4/MATH-500": {
        "test": lambda: [{"problem": q, "solution": f"\\boxed{{{a}}}"} for q, a in sums(8)],
    },
    "prometheus-eval/Feedback-Collection": {"train": lambda: _graded(24)},
    "hicai-zju/SciKnowEval": {"test": lambda: _science(40)},
}
"""Hub id -> split -> what makes its rows."""


def _asked(count: int) -> Rows:
    """Questions with choices, as a paper's own files have them."""
    say = lambda role, content: {"role": role, "content": content}  # noqa: E731
    listed = [
        "\n".join(f"{letter}: {text}" for letter, text in zip(CHOICES, t, strict=True)) for _, t, _ in exercises(count)
    ]
    return [
        {"messages": [say("system", "Choose."), say("user", f"{q}\n{choices}")], "letter": letter}
        for (q, _, letter), choices in zip(exercises(count), listed, strict=True)
    ]


SAVED: dict[tuple[str, ...], Callable[[], Rows]] = {
    ("science_data", "train_data"): lambda: [
        {
            "messages": row["messages"],
            "output_text": f"<reasoning>\nSo.\n</reasoning>\n<answer>\n{row['letter']}\n</answer>",
        }
        for row in _asked(8)
    ],
    ("science_data", "eval_data"): lambda: [{"prompt": row["messages"], "answer": row["letter"]} for row in _asked(4)],
    ("tooluse_data", "train_data"): lambda: [
        {"prompt": q, "golden_response": ["Action: search", f'Action Input: {{"query": "{a}"}}']} for q, a in facts(8)
    ],
    ("tooluse_data", "eval_data"): lambda: [
        {"prompt": q, "golden_answer": [{"Action": "search", "Action_Input": f'{{"query": "{a}"}}'}]}
        for q, a in facts(4)
    ],
}
"""Last two folders of a dataset on disk -> what makes its rows."""


def search_rows(count: int = 24) -> Rows:
    """Questions of the search recipe, in the columns of its parquet file."""
    return [{"question": q, "golden_answers": [a], "data_source": "nq"} for q, a in facts(count)]


def rubric_lines(count: int) -> Rows:
    """Conversations with what to look at in the reply, in the form of the rubric recipe's JSONL files."""
    item = {
        "extraction_regex": r"<score>(.*?)</score>",
        "grader_output_format_instruction": "Write the score between 0 and 1 as <score> ... </score>",
    }
    return [
        {
            "convo": [{"role": "user", "content": question}],
            "rubric_items": [{"rubric_str": f"Does the reply say {answer}?", **item}],
        }
        for question, answer in sums(count)
    ]
