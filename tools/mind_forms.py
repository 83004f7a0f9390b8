"""Writes example_data/minds/forms: conversations that show a small model the form of the model-aware environments' replies.

Their content is random: the numbers are independent of the word, the confidence of the answer. A model learns only the form from
them, and the rest from reinforcement learning.

    python -m tools.mind_forms
"""

import json
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tinker_cookbook.env.shipped.model_aware import (
    entropy_intuition,
    ghost_trace,
    gradient_prophet,
    intuition_env,
    self_prediction,
)
from tinker_cookbook.env.shipped.model_aware.lessons import shipped_lessons
from tinker_cookbook.env.shipped.model_aware.model_scores import MINDS
from tinker_cookbook.renderers import Message
from tinker_local_backend.command import check_command

LINES = 256
Row = Mapping[str, Any]


def _ghost_trace(row: Row, rng: random.Random) -> str:
    return ", ".join(str(rng.randint(0, ghost_trace.HIGHEST)) for _ in range(ghost_trace.COUNT))


def _self_prediction(row: Row, rng: random.Random) -> str:
    answer = row["answer"] if rng.random() < 0.5 else str(int(row["answer"]) + rng.randint(1, 9))
    return f"FINAL ANSWER: {answer} CONFIDENCE: {rng.randint(0, 10) / 10}"


def _entropy_intuition(row: Row, rng: random.Random) -> str:
    number, feeling = rng.choice(row["info"]["candidates"]), rng.choice(["sure", "unsure", "calm", "torn"])
    return f"NUMBER: {number}\nFEELING: {feeling}\nENTROPY: {rng.randint(0, 10) / 10}"


def _gradient_intuition(row: Row, rng: random.Random) -> str:
    return f"PREDICTION: {rng.randint(-100, 100) / 100}\nANSWER: {_self_prediction(row, rng)}"


def _in_context(row: Row, rng: random.Random) -> str:
    return f"[{rng.randint(-20, 40) / 2}]"


def _surprise(row: Row, rng: random.Random) -> str:
    count = len(row["info"]["probes"])
    return json.dumps(rng.sample(range(1, count + 1), count))


def _small_sums() -> Any:
    return self_prediction.load_environment(questions=50, highest=9, hard_share=0, operations="+")


def _sums_with_probes() -> Any:
    """Each sum with a random probe."""
    env, rng = _small_sums(), random.Random(0)
    probes = [probe for lesson in shipped_lessons() for probe in lesson.probes]
    rows = [{**row, "prompt": row["prompt"] + intuition_env.meta_task(rng.choice(probes))} for row in env.dataset * 4]
    return SimpleNamespace(dataset=rows, system_prompt=env.system_prompt)


FORMS: dict[str, tuple[Callable[[], Any], Callable[[Row, random.Random], str]]] = {
    "ghost_trace": (ghost_trace.load_environment, _ghost_trace),
    "self_prediction": (_small_sums, _self_prediction),
    "entropy_intuition": (lambda: entropy_intuition.load_environment(highest=9, most=4), _entropy_intuition),
    "in_context": (gradient_prophet.load_environment, _in_context),
    "surprise": (lambda: gradient_prophet.load_environment("surprise"), _surprise),
    "gradient_intuition": (_sums_with_probes, _gradient_intuition),
}


def conversations(name: str) -> list[list[Message]]:
    """The conversations of one file: a question of its environment, and a reply in the right form."""
    load, reply = FORMS[name]
    env, rng = load(), random.Random(name)
    system = getattr(env, "system_prompt", "")
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    rows = [rng.choice(env.dataset) for _ in range(LINES)]
    return [
        [*before, {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": reply(row, rng)}]
        for row in rows
    ]


def main() -> None:
    folder = MINDS / "forms"
    folder.mkdir(exist_ok=True)
    for name in FORMS:
        lines = [json.dumps({"messages": messages}) for messages in conversations(name)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    check_command()
    main()
