"""Programs as answers of debates: the judge runs one input, which is named by an opponent, by the author, or at random.

The question shows the inputs of the hidden tests without their outputs. Each is a step of every answer: the program gives the
right output for it. All of them are only run to measure what is right (`score`), and for the protocol `truth`.
"""

import json
import re
from typing import Any, ClassVar

from tinker_cookbook.data.rows import Row
from tinker_cookbook.env.reward_functions import RewardSpec
from tinker_cookbook.env.shipped.code.code_env import question_text
from tinker_cookbook.env.shipped.code.grading import Outcome, grade
from tinker_cookbook.env.shipped.code.problems import CodeProblem, CodeTest, load_problems, read_problem
from tinker_cookbook.env.steps import Step, StepTask
from tinker_cookbook.env.task import Score, TaskItem, parse_solution
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sandbox import SandboxLimits, get_sandbox
from tinker_cookbook.utils.code_blocks import last_code_block

CODE_SYSTEM = "Solve the problem in Python. Put the whole program between <SOLUTION> and </SOLUTION>."
OBJECTION_REQUEST = (
    "Another agent wrote:\n{opponent}\nFor which of the inputs is its output wrong? The judge runs that one. "
    "Begin with its name, as in: input c is wrong."
)
SUPPORT_REQUEST = "Which of the inputs may the judge run? Begin with its name, as in: input c is right."
LIMITS = SandboxLimits(wall_s=4.0, cpu_s=4.0)
"""Of each test."""
SHOWN = 1
"""Tests of a problem that the question shows with their outputs."""
LONGEST_INPUT = 200

_NAMED = re.compile(r"\s*(?:input )?([a-z]) is (?:wrong|right)\b", re.IGNORECASE)


def problem_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The shipped problems as rows of this task, for training and for testing; `reference` is the JSON of a problem."""
    train, test = load_problems("problems")
    return [problem_row(problem) for problem in train], [problem_row(problem) for problem in test]


def problem_row(problem: CodeProblem) -> dict[str, str]:
    """A problem as a row: the question names the inputs of its tests."""
    inputs = "\n".join(f"{name}: {text}" for name, text in _inputs(problem).items())
    question = f"{question_text(problem, SHOWN)}\n\nInputs that may be checked:\n{inputs}"
    return {"id": problem.id, "question": question, "reference": problem_json(problem)}


def problem_json(problem: CodeProblem) -> str:
    """A problem as an item's reference, from which `problem_of` reads it."""
    tests = [{"input": test.input, "output": test.output} for test in problem.tests]
    content: dict[str, Any] = {"id": problem.id, "question": problem.question, "tests": tests}
    if problem.function is not None:
        content["function"] = problem.function
    if problem.solution:
        content["solution"] = problem.solution
    return json.dumps(content)


def _inputs(problem: CodeProblem) -> dict[str, str]:
    """Name -> input, of the tests that are not shown."""
    shown = {chr(ord("a") + i): json.dumps(test.input) for i, test in enumerate(problem.tests[SHOWN : SHOWN + 26])}
    return {name: text if len(text) <= LONGEST_INPUT else f"{text[:LONGEST_INPUT]}..." for name, text in shown.items()}


class CodeTask(StepTask):
    """The answer is a program between the tags; it is right if it passes every test. `sandbox` is where programs run."""

    name = "code"
    system_prompt = CODE_SYSTEM
    columns = (("question",), ("reference",))
    default_dataset = "tinker_cookbook.env.shipped.questions.code:problem_rows"
    default_reward = "exact_match"
    debate_prompts: ClassVar = {"confidence": "", "rebuttal": OBJECTION_REQUEST, "support": SUPPORT_REQUEST}
    objection_request = OBJECTION_REQUEST
    support_request = SUPPORT_REQUEST
    sandbox: ClassVar[str] = "bubblewrap"
    """get_sandbox's name; a subclass with another one is named by task=path/file.py:Class"""

    def __init__(self, reward: RewardSpec | None = None):
        if reward is not None:
            raise ConfigurationError("reward_fn: task=code is rewarded by its tests; leave it out")
        super().__init__()
        self._sandbox = get_sandbox(self.sandbox)
        self._sandbox.check()

    @staticmethod
    def program(text: str) -> str | None:
        """The program of an answer, with or without a code block between the tags; None without tags."""
        solution = parse_solution(text)
        if solution is None:
            return None
        return last_code_block(solution) or solution

    async def score(self, item: TaskItem, text: str) -> Score:
        """The share of tests passed that the question does not show."""
        program = self.program(text)
        share = 0.0
        if program is not None:
            share = (await grade(problem_of(item), program, self._sandbox, LIMITS)).passed(SHOWN)
        metrics = {"correct": float(share == 1.0), "parsed": float(program is not None), "task_reward": share}
        return Score(share, metrics, share == 1.0)

    def steps(self, item: TaskItem, text: str) -> list[Step] | None:
        """A step for each input; `holds` is not known before `check_step` runs it."""
        if self.program(text) is None:
            return None
        return [
            Step(name, f"the output for {given} is right", False) for name, given in _inputs(problem_of(item)).items()
        ]

    async def check_step(self, item: TaskItem, text: str, step: Step) -> Step:
        """Run the program on the one input of the step."""
        problem = problem_of(item)
        return await self.run_step(problem, text, step, problem.tests[SHOWN + list(_inputs(problem)).index(step.name)])

    async def run_step(self, problem: CodeProblem, text: str, step: Step, test: CodeTest) -> Step:
        """The step of an answer after its program has run on this test."""
        program = self.program(text)
        assert program is not None
        outcome = await self.run(problem, program, test)
        if outcome.status == "passed":
            return Step(step.name, f"{step.claim} (run: it is)", True)
        said = outcome.error or f"the output is {outcome.output!r:.200}, and should be {test.output!r:.200}"
        return Step(step.name, f"{step.claim} (run: {said})", False)

    async def run(self, problem: CodeProblem, program: str, test: CodeTest) -> Outcome:
        """A program on one test."""
        (outcome,) = (await grade(problem, program, self._sandbox, LIMITS, [test])).outcomes
        return outcome

    def named_step(self, speech: str) -> str | None:
        named = _NAMED.match(speech)
        return named.group(1).lower() if named else None

    def judge_context(self, item: TaskItem) -> str:
        return problem_of(item).question

    def reference_answer(self, item: TaskItem) -> str:
        """No program is shipped with an item; the tests are its key."""
        return item.reference


def problem_of(item: TaskItem) -> CodeProblem:
    """The problem of an item."""
    return read_problem(Row(item.id, 0, json.loads(item.reference)))
