"""A task's score outside of an event loop."""

import asyncio

from tinker_cookbook.env.task import Score, Task, TaskItem
from tinker_cookbook.utils.misc_utils import resolved


def score(task: Task, item: TaskItem, text: str) -> Score:
    async def scored() -> Score:
        return await resolved(task.score(item, text))

    return asyncio.run(scored())
