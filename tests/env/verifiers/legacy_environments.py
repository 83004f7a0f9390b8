"""Environments as one writes them for verifiers before 0.4: they know nothing of this library."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip(" .") == answer)


def brief(completion: Any, info: dict[str, Any]) -> float:
    return info["level"] / (1.0 + len(completion[-1]["content"]))


def shortest(completions: Any) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def turns(state: Any) -> float:
    return len(state["trajectory"]) / 4


def broken(completion: Any) -> float:
    raise KeyError("no such field")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Haggle(vf.MultiTurnEnv):
    """Three turns, of which the second is asked again with other words, and a first turn that is shown no more."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if len(state["trajectory"]) == 3:
            raise vf.ToolError("the shop is closed")
        return [{"role": "user", "content": f"Offer {len(state['trajectory'])}?"}]

    async def get_prompt_messages(self, state: Any) -> Any:
        if len(state["trajectory"]) == 2:
            return [{"role": "user", "content": "Forget it. Offer again."}]
        return await super().get_prompt_messages(state)


def load_environment(kind: str = "sums", highest: int = 3, max_turns: int = 3) -> vf.Environment:
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b), "info": {"level": 0.5}}
        for a in range(highest + 1)
        for b in range(highest + 1)
    ]
    split = [[row for row in rows if (row["question"][8] == row["question"][12]) is held] for held in (False, True)]
    data = {
        "dataset": Dataset.from_list(split[0]),
        "eval_dataset": Dataset.from_list(split[1]),
        "system_prompt": "Add.",
    }
    if kind == "sums":
        return vf.SingleTurnEnv(rubric=vf.Rubric([right, brief], [1.0, 0.2]), **data)
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric([right, shortest]), **data)
    if kind == "broken":
        return vf.SingleTurnEnv(rubric=vf.Rubric([right, broken]), **data)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=max_turns, rubric=vf.Rubric([right]), **data)
    return Haggle(max_turns=max_turns, rubric=vf.Rubric([turns]), **data)
