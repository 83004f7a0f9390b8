"""Programming problems: how rows are read, how programs are graded, and what they are worth."""

import ast
import asyncio
import json
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.sandbox.running import usable
from tinker_cookbook.data import hub
from tinker_cookbook.data.rows import BadRows, Row
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.code import problems
from tinker_cookbook.env.shipped.code.code_env import NO_CODE, CodeEnv, CodeProblems, CodeRewards, question_text
from tinker_cookbook.env.shipped.code.grading import (
    Grade,
    grade,
    read_outcomes,
    same_output,
    same_value,
)
from tinker_cookbook.env.shipped.code.problems import CodeProblem, CodeTest, ProblemColumns, load_problems, read_problem
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.rl.message_env import MessageStepResult
from tinker_cookbook.rl.types import InitialObservationOverflow
from tinker_cookbook.sandbox import SandboxLimits, SandboxResult
from tinker_cookbook.utils.code_blocks import last_code_block
from tools.code_problems.__main__ import rows

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60.0)
DOUBLE = CodeProblem(
    "double", "Return twice a number.", tuple(CodeTest([n], 2 * n) for n in range(5)), "double", "def double(n):"
)
ECHO = CodeProblem("echo", "Write the input twice.", tuple(CodeTest(f"{n}\n", f"{n}\n{n}\n") for n in range(4)))


def graded(problem: CodeProblem, code: str, limits: SandboxLimits = LIMITS) -> Grade:
    return asyncio.run(grade(problem, code, usable(), limits))


def statuses(problem: CodeProblem, code: str, limits: SandboxLimits = LIMITS) -> list[str]:
    return [outcome.status for outcome in graded(problem, code, limits).outcomes]


class TestShipped:
    def test_there_are_sixty_with_hidden_tests(self) -> None:
        train, test = load_problems("problems")
        assert (len(train), len(test)) == (48, 12)
        everything = [*train, *test]
        assert len({problem.id for problem in everything}) == len({problem.question for problem in everything}) == 60
        assert sum(problem.function is None for problem in everything) == 20
        assert min(len(problem.tests) for problem in everything) >= 9
        for problem in everything:
            assert len({json.dumps(test.input) for test in problem.tests}) == len(problem.tests)
            often = Counter(json.dumps(test.output) for test in problem.tests).most_common(1)[0][1]
            assert often <= 5, f"{problem.id}: a constant passes"

    @pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 10])
    def test_a_reference_solution_passes_every_test(self, every: int) -> None:
        sandbox = usable("unsafe_subprocess")  # they are ours, and are tested where there is no other sandbox

        async def main() -> dict[str, Grade]:
            train, test = load_problems("problems")
            return {one.id: await grade(one, one.solution, sandbox, LIMITS) for one in (*train, *test)[::every]}

        assert {name: one.outcomes for name, one in asyncio.run(main()).items() if not one.all_passed} == {}

    def test_the_files_are_those_that_the_tool_writes(self) -> None:
        files = [EXAMPLE_DATA / "code" / f"{split}.jsonl" for split in ("train", "test")]
        written = {row["id"]: row for file in files for row in map(json.loads, file.read_text().splitlines())}

        def without_spelling(row: dict[str, Any]) -> dict[str, Any]:
            """From Python 3.12 on `ast` writes quotes within f-strings in another way."""
            return {**row, "solution": ast.dump(ast.parse(row["solution"]))}

        assert {name: without_spelling(row) for name, row in written.items()} == {
            row["id"]: without_spelling(row) for row in rows()
        }


class TestGrading:
    def test_a_solution(self) -> None:
        assert statuses(DOUBLE, "def double(n):\n    return n + n") == ["passed"] * 5
        assert statuses(DOUBLE, "class Solution:\n    def double(self, n):\n        return 2 * n") == ["passed"] * 5
        assert statuses(ECHO, "x = input()\nprint(x)\nprint(x)") == ["passed"] * 4
        main = "def main():\n    x = input()\n    print(x, x, sep='\\n')\nif __name__ == '__main__':\n    main()"
        assert statuses(ECHO, main) == ["passed"] * 4

    def test_partly_right(self) -> None:
        result = graded(DOUBLE, "def double(n):\n    return n * n")
        assert [outcome.status for outcome in result.outcomes] == ["passed", "wrong", "passed", "wrong", "wrong"]
        assert (result.passed(), result.passed(2), result.passed(9)) == (0.4, 1 / 3, 0.4)
        assert result.outcomes[3].output == 9 and not result.all_passed

    @pytest.mark.parametrize(
        ("code", "status", "error"),
        [
            ("def double(n)\n    return n", "compile", "SyntaxError: expected ':' (line 1)"),
            ("def double(n):\n    return 1 / 0", "error", "ZeroDivisionError: division by zero (line 2)"),
            ("def other(n): pass", "error", "NameError: there is no function double"),
            ("def double(n):\n    return {n}", "error", "TypeError: Object of type set is not JSON serializable"),
            ("import os\nos._exit(0)", "error", "it ended without returning"),
            ("import os\nos.kill(os.getpid(), 11)", "error", "it was killed by SIGSEGV"),
            ("def double(n):\n    raise SystemExit(3)", "error", "SystemExit: 3"),
            ("def double(n):\n    return 'x' * 10**6", "error", "it writes more than 4098 bytes"),
            ("x = " + "(" * 3000 + ")" * 3000, "compile", "SyntaxError: too many nested parentheses (line 1)"),
        ],
    )
    def test_errors_are_told_with_their_line(self, code: str, status: str, error: str) -> None:
        outcomes = graded(DOUBLE, code).outcomes
        assert {(outcome.status, outcome.error) for outcome in outcomes} == {(status, error)}

    def test_one_endless_test_does_not_take_the_others(self) -> None:
        code = "def double(n):\n    while n == 1: pass\n    return 2 * n"
        assert statuses(DOUBLE, code, SandboxLimits(wall_s=3.0)) == ["passed", "timeout", "passed", "passed", "passed"]

    def test_a_program_that_ends_with_an_error_code(self) -> None:
        assert statuses(ECHO, "import sys\nx = input()\nprint(x)\nprint(x)\nsys.exit(x == '2')") == [
            "passed",
            "passed",
            "error",
            "passed",
        ]

    def test_no_expected_output_is_in_reach(self) -> None:
        """Reading everything that it can, a solution finds inputs, and no output."""
        problem = CodeProblem("p", "?", (CodeTest(["first"], "s3cret-1"), CodeTest(["other"], "s3cret-2")), "f")
        code = """
import gc, os, sys
def f(x):
    found = [str(o)[:2000] for o in gc.get_objects() if isinstance(o, (str, dict, list))]
    for folder, _, names in os.walk("/tmp"):
        found += [open(os.path.join(folder, name), errors="replace").read() for name in names]
    found += [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
    return "s3cret-1" if any("s3cret" + "-1" in text for text in found if "gc.get_objects" not in text) else "nothing"
"""
        assert [outcome.output for outcome in graded(problem, code).outcomes] == ["nothing", "nothing"]

    def test_writing_where_the_runner_writes_wins_nothing(self) -> None:
        forged = json.dumps({"status": "ok", "output": None})
        code = f"""
import os
with open(f"/proc/{{os.getppid()}}/fd/1", "w") as results:
    print({forged!r} * 1, file=results, flush=True)
os.kill(os.getppid(), 9)
"""
        assert "passed" not in statuses(DOUBLE, code)

    def test_a_killed_runner_fails_every_test(self) -> None:
        result = graded(DOUBLE, "import os\nos.kill(os.getppid(), 9)")
        assert [outcome.status for outcome in result.outcomes] == ["error", *["not run"] * 4]

    def test_memory_of_the_whole_run(self) -> None:
        result = graded(DOUBLE, "x = bytearray(10**9)\nx[::4096] = x[::4096]\ndef double(n): return 2 * n")
        assert result.passed() == 0

    @given(st.text(), st.integers(0, 3))
    @examples(60)
    def test_whatever_stands_there_passes_nothing(self, written: str, lines: int) -> None:
        result = SandboxResult(stdout=f"{written}\n" * lines, stderr="", exit_code=0)
        assert all(outcome.status != "passed" for outcome in read_outcomes(result, DOUBLE.tests))


class TestComparing:
    @pytest.mark.parametrize(
        ("got", "wanted", "same"),
        [
            ("1 2\n", "1 2", True),
            ("1  2 \n\n", "1 2\n", True),
            ("1\n2", "1 2", False),
            ("", "0", False),
            ("0.3333333333", "0.33333333", True),
            ("0.34", "0.33", False),
            ("1e3", "1000.0", True),
            ("3.0", "3", True),
            ("10", "1_0", False),
            ("1000001", "1000000", False),
            ("nan", "nan", True),
            ("nan.", "1.0", False),
            ("yes", "Yes", False),
        ],
    )
    def test_outputs(self, got: str, wanted: str, same: bool) -> None:
        assert same_output(got, wanted) is same

    @pytest.mark.parametrize(
        ("got", "wanted", "same"),
        [
            (1, 1.0, True),
            (True, 1, False),
            (1, True, False),
            (0.1 + 0.2, 0.3, True),
            (10**20 + 1, 10**20, False),
            ([1, [2.0]], [1, [2]], True),
            ([1], [1, 1], False),
            ({"a": 1}, {"a": 1.0}, True),
            ({"a": 1}, {"b": 1}, False),
            (None, None, True),
            (None, 0, False),
            ("1", 1, False),
            ([], {}, False),
        ],
    )
    def test_values(self, got: Any, wanted: Any, same: bool) -> None:
        assert same_value(got, wanted) is same

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("```python\nx\n```", "x\n"),
            ("a ```\none\n``` b ```py\ntwo\n``` c", "two\n"),
            ("```python\nx\n``` and ```open\ny", "x\n"),
            ("```x```", None),
            ("no code", None),
            ("```python\nx", None),
            ("```two words\nx\n```", None),
            ("", None),
        ],
    )
    def test_code_blocks(self, text: str, code: str | None) -> None:
        assert last_code_block(text) == code

    @given(st.text(alphabet="`\na "))
    @examples(100)
    def test_any_text_has_a_block_or_none(self, text: str) -> None:
        block = last_code_block(text)
        assert block is None or block in text


def row(**content: Any) -> Row:
    return Row("here:1", 1, content)


class TestRows:
    def test_lists_of_tests(self) -> None:
        read = read_problem(row(question="?", tests=[{"input": "1", "output": "2"}], id=7))
        assert read == CodeProblem("7", "?", (CodeTest("1", "2"),))

    def test_livecodebench(self) -> None:
        tests = [{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}]
        read = read_problem(row(problem="?", tests=json.dumps(tests), starter_code="class Solution: ..."))
        assert (read.function, read.tests[0].input, read.tests[0].output) == ("f", [[1, 2], "a"], [3])
        assert read.starter_code == "class Solution: ..." and read.id == "here:1"

    def test_the_function_may_stand_in_the_row(self) -> None:
        tests = [{"input": "1", "output": "2", "testtype": "functional"}]
        assert read_problem(row(prompt="?", tests=tests, metadata='{"func_name": "g"}')).function == "g"

    def test_taco(self) -> None:
        read = read_problem(
            row(question="?", ground_truth='{"inputs": ["1\\n", ["2", "3"]], "outputs": ["x", ["y", "z"]]}')
        )
        assert read.tests == (CodeTest("1\n", "x"), CodeTest("2\n3", "y\nz")) and read.function is None
        called = {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}
        read = read_problem(row(question="?", tests=called))
        assert (read.function, read.tests) == ("f", (CodeTest([1, 2], 3),))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"question": "?"}, "has no 'tests'"),
            ({"tests": []}, "has no 'question'"),
            ({"question": "?", "tests": []}, "at least one"),
            ({"question": "?", "tests": "{"}, "'tests' is not JSON"),
            ({"question": "?", "tests": [{"input": "1"}]}, "with input and output"),
            ({"question": "?", "tests": 3}, "must be a list of tests"),
            ({"question": "?", "tests": {"inputs": ["1"], "outputs": []}}, "of the same length"),
            (
                {"question": "?", "tests": [{"input": "1", "output": "2", "testtype": "functional"}]},
                "func_name is missing",
            ),
            (
                {"question": "?", "tests": [{"input": 3, "output": "2"}], "function": "f"},
                "it is the list of its arguments",
            ),
        ],
    )
    def test_rows_that_are_no_problem(self, content: Mapping[str, Any], message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            read_problem(row(**content))

    def write(self, path: Path, *contents: Any) -> str:
        path.write_text("".join(json.dumps(content) + "\n" for content in contents))
        return str(path)

    def test_other_columns(self, tmp_path: Path) -> None:
        file = self.write(tmp_path / "p.jsonl", {"task": "?", "cases": [{"input": "1", "output": "2"}]})
        ((problem,), test) = load_problems(file, ProblemColumns(question="task", tests="cases"))
        assert problem.question == "?" and test == []
        with pytest.raises(DataFormatError, match=r"p\.jsonl:1: has no 'text'"):
            load_problems(file, ProblemColumns(question="text"))

    def test_bad_rows_raise_with_their_place_or_are_left_out_and_counted(self, tmp_path: Path) -> None:
        good = {"question": "?", "tests": [{"input": "1", "output": "2"}]}
        file = self.write(tmp_path / "p.jsonl", good, {"question": "?"}, good)
        with pytest.raises(DataFormatError, match=r"p\.jsonl:2: has no 'tests'"):
            load_problems(file)
        bad = BadRows("skip")
        assert len(load_problems(file, bad=bad)[0]) == 2 and bad.count == 1

    def test_a_folder_in_the_form_of_the_hub(self, tmp_path: Path) -> None:
        tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
        for split in ("train", "test"):
            self.write(tmp_path / f"{split}.jsonl", {"problem": split, "tests": tests})
        train, test = load_problems(str(tmp_path))
        assert [problem.question for problem in (*train, *test)] == ["train", "test"]

    def test_deepcoder_has_the_configurations_of_tinker_cookbook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load(name: str, split: str, config: str) -> list[dict[str, Any]]:
            asked.append((name, split, config))
            return [{"problem": config, "tests": '[{"input": "1", "output": "2", "testtype": "stdin_stdout"}]'}]

        monkeypatch.setattr(hub, "load", load)
        train, test = load_problems("deepcoder")
        assert [problem.question for problem in train] == ["primeintellect", "taco", "lcbv5"]
        assert [problem.question for problem in test] == ["codeforces", "lcbv5"]
        assert asked[0] == (problems.DEEPCODER_DATASET, "train", "primeintellect")

    def test_an_unknown_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="dataset='problem' is unknown; use problems, deepcoder"):
            load_problems("problem")


def play(env: CodeEnv, *replies: str) -> list[MessageStepResult]:
    async def main() -> list[MessageStepResult]:
        await env.initial_observation()
        return [await env.step({"role": "assistant", "content": reply}) for reply in replies]

    return asyncio.run(main())


def block(code: str) -> str:
    return f"Here:\n```python\n{code}\n```"


class TestEpisodes:
    def env(self, problem: CodeProblem = DOUBLE, max_turns: int = 2, **rewards: Any) -> CodeEnv:
        return CodeEnv(problem, usable(), LIMITS, CodeRewards(**rewards), max_turns)

    def test_right_at_once(self) -> None:
        (result,) = play(self.env(), block("def double(n): return 2 * n"))
        assert result.episode_done and result.reward == 1.0
        assert result.metrics["correct"] == 1.0 and result.metrics["turns"] == 1.0

    def test_an_error_is_told_and_may_be_mended(self) -> None:
        first, second = play(self.env(), block("def double(n): return n / 0"), block("def double(n): return 2 * n"))
        assert not first.episode_done and first.reward == 0
        told = first.next_messages[-1]["content"]
        assert "double(0) returns 0" in told and "ZeroDivisionError: division by zero (line 1)" in told
        assert "3 of 3 hidden tests fail" in told
        assert second.episode_done and second.reward == 1.0 and second.metrics["turns"] == 2.0
        assert second.next_messages[: len(first.next_messages)] == first.next_messages

    def test_compile_errors_are_told(self) -> None:
        first, last = play(self.env(), block("def double(n) return"), block("def double(n) return"))
        assert "cannot be compiled: SyntaxError" in str(first.next_messages[-1]["content"])
        assert last.episode_done and last.reward == 0 and last.metrics["compile_error"] == 1.0

    def test_hidden_tests_stay_hidden(self) -> None:
        problem = CodeProblem("p", "?", (CodeTest([1], 1), CodeTest([271828], 314159)), "f")
        env = self.env(problem, shown_tests=1)
        result, _ = play(env, block("def f(x): return x"), block("def f(x): return x"))
        said = str(result.next_messages)
        assert "314159" not in said and "271828" not in said and "1 of 1 hidden tests fail" in said

    def test_only_hidden_tests_are_paid(self) -> None:
        (result,) = play(self.env(max_turns=1), block("def double(n): return {0: 0, 1: 2, 4: 8}.get(n)"))
        assert result.reward == result.metrics["tests_passed"] == 1 / 3

    def test_all_or_nothing(self) -> None:
        code = block("def double(n): return 2 * n if n < 4 else 0")
        assert play(self.env(max_turns=1), code)[0].reward == 2 / 3
        assert play(self.env(max_turns=1, partial_credit=False), code)[0].reward == 0

    def test_a_reply_without_code_costs(self) -> None:
        first, last = play(self.env(), "def double", "again")
        assert first.next_messages[-1]["content"] == NO_CODE
        assert (last.reward, last.metrics["format"]) == (-0.1, 0.0)

    def test_the_question(self) -> None:
        text = question_text(DOUBLE, 1)
        assert text.endswith(
            "Write the function double.\n\nBegin with\n```python\ndef double(n):\n```\n\nExample:\ndouble(0) returns 0"
        )
        assert question_text(ECHO, 1).endswith(
            "Read from stdin and write to stdout.\n\nExample:\ninput:\n0\noutput:\n0\n0"
        )

    def test_an_episode_pickles(self) -> None:
        env = pickle.loads(pickle.dumps(self.env()))
        assert play(env, block("def double(n): return 2 * n"))[0].reward == 1.0


class TestDataset:
    def test_groups_of_the_shipped_problems(self) -> None:
        usable()
        builder = CodeProblems().dataset_builder("tiny_chat", groups_per_batch=4, group_size=2, num_batches=2)

        async def main() -> None:
            train, test = await builder()
            assert len(train) == 2 and test is not None
            groups = train.get_batch(0)
            assert len(groups) == 4
            envs = await groups[0].make_envs()
            assert len(envs) == 2
            first, second = [await env.initial_observation() for env in envs]
            assert not isinstance(first, InitialObservationOverflow) and not isinstance(
                second, InitialObservationOverflow
            )
            assert first[0].to_ints() == second[0].to_ints()

        asyncio.run(main())

    def test_no_sandbox_no_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="without isolation only with sandbox=unsafe_subprocess"):
            CodeProblems(sandbox=None).dataset_builder("tiny_chat")

    def test_more_groups_than_problems(self) -> None:
        usable()
        with pytest.raises(ConfigurationError, match="groups_per_batch=60, but the dataset has 48 problems"):
            CodeProblems().dataset_builder("tiny_chat", groups_per_batch=60)
