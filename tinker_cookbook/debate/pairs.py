"""Debates as preference data: the winner's answer versus the loser's, for DPO and preference models.

Only answers are compared, because both have the same prompt. Speeches answer different opponents, so they have no
common prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.debate.saved import SavedDebate
from tinker_cookbook.env.task import Task, TaskItem
from tinker_cookbook.exceptions import DataFormatError


def comparisons(debates: Sequence[SavedDebate], task: Task, items: Sequence[TaskItem]) -> list[dict[str, Any]]:
    """Rows that `recipes.preference.train` reads, one for each loser of a decided debate whose answer differs from the winner's.

    Args:
        items: the task's items, which include each debate's question by id.

    Raises:
        DataFormatError: a debate is about a question that is not among the items.
    """
    by_id, rows = {item.id: item for item in items}, list[dict[str, Any]]()
    for debate in debates:
        winner, seats = debate.verdict.seat, debate.view.seats
        if winner is None or len(seats) < 2 or winner >= len(seats) or not seats[winner].rounds:
            continue
        if debate.instance_id not in by_id:
            raise DataFormatError(
                f"debate about {debate.instance_id!r}: no such item in task={task.name}; give the task and dataset of the run"
            )
        prompt = task.messages(by_id[debate.instance_id], CONFIDENCE_REQUEST)
        chosen = seats[winner].rounds[0]
        for seat in seats:
            if seat.rounds and seat.role != "critic" and seat.rounds[0] != chosen:
                replies = [[{"role": "assistant", "content": text}] for text in (chosen, seat.rounds[0])]
                compared = {"prompt_conversation": prompt, "completion_A": replies[0], "completion_B": replies[1]}
                rows.append({"comparison": compared, "label": "A"})
    return rows
