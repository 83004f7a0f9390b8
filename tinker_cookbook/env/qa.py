"""Questions with a short exact answer."""

from typing import ClassVar

from tinker_cookbook.env.reward_functions import exact_match
from tinker_cookbook.env.task import Score, Task, TaskItem, parse_solution

QA_SYSTEM = "Answer the question. Put only the final answer between <SOLUTION> and </SOLUTION>."


class QATask(Task):
    """The answer is between <SOLUTION> tags; it is right when it equals the reference."""

    name = "qa"
    system_prompt = QA_SYSTEM
    columns = (("question", "prompt", "problem"), ("answer", "solution", "reference"))
    shipped: ClassVar = {
        "arithmetic": ("qa/arithmetic_train.jsonl", "qa/arithmetic_test.jsonl"),
        "test": ("qa/test.jsonl", "qa/test_held_out.jsonl"),
    }
    default_dataset = "arithmetic"
    default_reward = "exact_match"

    @staticmethod
    def read_reference(text: str) -> str:
        """The whole text, or the part after ####: GSM8K writes the answer there, after its derivation."""
        return text.rsplit("####", 1)[1].strip() if "####" in text else text

    def is_right(self, item: TaskItem, solution: str) -> bool:
        """Whether this is the right answer; by default whether it equals the reference."""
        return exact_match(solution, item.question, item.reference) == 1.0

    async def score(self, item: TaskItem, text: str) -> Score:
        solution = parse_solution(text)
        reward, scores = await self.reward(solution, item.question, item.reference, text)
        correct = solution is not None and self.is_right(item, solution)
        metrics = {"correct": float(correct), "parsed": float(solution is not None), "task_reward": reward}
        return Score(reward, metrics | {f"reward/{name}": value for name, value in scores.items()}, correct)
