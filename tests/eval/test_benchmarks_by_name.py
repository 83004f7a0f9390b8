"""What must hold of benchmarks by name: rows become questions, and replies are graded."""

import asyncio
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from tests.eval.named import IFEVAL, RENDERER, write
from tinker_cookbook import eval as evaluation
from tinker_cookbook.data import hub
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.eval import benchmarks
from tinker_cookbook.eval.benchmarks import ifbench
from tinker_cookbook.eval.benchmarks.builder import Graded, QuestionBenchmark
from tinker_cookbook.eval.benchmarks.ceval import SUBJECTS
from tinker_cookbook.eval.benchmarks.gsm8k import GSM8KBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.mbpp import MBPPBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.registry import REGISTRY, find_benchmark, get_benchmark, register
from tinker_cookbook.eval.benchmarks.runner import BenchmarkConfig
from tinker_cookbook.exceptions import BenchmarkNotFoundError, ConfigurationError, DataFormatError
from tinker_cookbook.sandbox.backends import SandboxKeys

UNSAFE = SandboxKeys(sandbox="unsafe_subprocess", memory_mb=4096)

AIME = {"problem_idx": 3, "problem": "Find n.", "answer": 7, "problem_type": ["Algebra"]}
CHOICES = ["iron", "gold", "zinc", "tin"]
GPQA = {
    "Record ID": "rec1",
    "Question": "Which metal?",
    "Correct Answer": "gold\n",
    "Incorrect Answer 1": "iron",
    "Incorrect Answer 2": "zinc",
    "Incorrect Answer 3": "tin",
}
MBPP = {
    "task_id": 2,
    "prompt": "Write a function f that doubles.",
    "code": "def f(x): return 2 * x",
    "test_imports": ["import math"],
    "test_list": ["assert f(2) == 4", "assert f(math.pi) == 2 * math.pi"],
}
ROWS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # name -> a row of the hub's columns, the item's id, a right reply, a wrong one
    "aime": (AIME, "aime_3", r"\boxed{007}", r"\boxed{70}"),
    "aime_2024": ({"id": 60, "problem": "Find n.", "solution": "...", "answer": "025"}, "aime_2024_60", "25", "24"),
    "aime_2025": (AIME, "aime_2025_3", r"\boxed{7}", "I give up"),
    "aime_2026": (AIME, "aime_2026_3", "The answer is 7", "The answer is 8"),
    "ceval": (
        {"id": 0, "question": "哪种金属？", **dict(zip("ABCD", CHOICES, strict=True)), "answer": "B"},
        "ceval_0",
        "答案是B",
        "答案是C",
    ),
    "gsm8k": ({"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}, "gsm8k_1", "#### 1004", "#### 4"),
    "ifeval": (IFEVAL, "ifeval_1000", "no commas here", "no, three words"),
    "math500": (
        {"problem": "Half?", "solution": r"So \boxed{\frac{1}{2}}.", "unique_id": "test/x/1.json"},
        "math500_test/x/1.json",
        r"\boxed{0.5}",
        r"\boxed{2}",
    ),
    "mbpp": (MBPP, "mbpp_2", "```python\ndef f(x):\n    return 2 * x\n```", "```python\ndef f(x):\n    return 4\n```"),
    "mmlu_pro": (
        {"question_id": 70, "question": "Which?", "options": [*CHOICES, "lead"], "answer": "E", "answer_index": 4},
        "mmlu_pro_70",
        "E",
        "D",
    ),
    "mmlu_redux": (
        {"question": "Which?", "choices": CHOICES, "answer": 1, "error_type": "ok"},
        "mmlu_redux_1",
        "B",
        "A",
    ),
    "supergpqa": (
        {"uuid": "u1", "question": "Which?", "options": CHOICES, "answer": "gold", "answer_letter": "B"},
        "supergpqa_u1",
        "so (B)",
        "so (C)",
    ),
}


def question_benchmark(name: str, path: str) -> QuestionBenchmark:
    builder = get_benchmark(name, path)
    assert isinstance(builder, QuestionBenchmark)
    return builder.with_sandbox(UNSAFE) if isinstance(builder, MBPPBenchmarkBuilder) else builder


def graded(builder: QuestionBenchmark, item: TaskItem, reply: str) -> Graded:
    async def ask() -> Graded:
        result = builder.grade(item, reply)
        return result if isinstance(result, Graded) else await result

    return asyncio.run(ask())


class TestRows:
    def test_every_name_has_a_row(self) -> None:
        assert {*ROWS, "gpqa", "ifbench"} == {*REGISTRY}

    @pytest.mark.parametrize("name", ROWS)
    def test_a_row_is_asked_and_graded(self, name: str, tmp_path: Path) -> None:
        if name == "math500":
            pytest.importorskip("math_verify")
        row, item_id, right, wrong = ROWS[name]
        builder = question_benchmark(name, write(tmp_path / "rows.jsonl", row))
        (item,) = builder.load()
        assert item.id == item_id
        assert str(row.get("question", row.get("problem", row.get("prompt")))) in item.question
        assert graded(builder, item, right).correct and not graded(builder, item, wrong).correct
        assert not graded(builder, item, "").correct
        (env,) = pickle.loads(pickle.dumps(builder)).make_envs(RENDERER, BenchmarkConfig(max_tokens=8))
        assert env.get_messages() == [{"role": "user", "content": item.question}]

    @pytest.mark.parametrize("name", ROWS)
    def test_a_row_without_its_columns_is_refused_with_its_place(self, name: str, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl", ROWS[name][0], {"other": 1})
        with pytest.raises(DataFormatError, match=r"rows.jsonl:2: .*expected \{"):
            question_benchmark(name, path).load()

    @pytest.mark.parametrize(
        ("name", "changed", "message"),
        [
            ("aime", {"answer": "7.5"}, "integer from 0 to 999"),
            ("ceval", {"answer": "E"}, "one of the letters of its 4 choices"),
            ("mmlu_pro", {"answer_index": 5}, "one of the letters of its 5 choices"),
            ("mmlu_redux", {"answer": 99}, "index of a choice"),
            ("supergpqa", {"options": []}, "list of texts"),
            ("ifeval", {"kwargs": [{}]}, "1 entries for 2 instructions"),
            ("ifeval", {"instruction_id_list": ["count:unique"] * 2}, "'count:unique' has no checker"),
            ("mbpp", {"test_list": "assert f(1)"}, "list of texts"),
        ],
    )
    def test_a_wrong_value_is_named(self, name: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl", {**ROWS[name][0], **changed})
        with pytest.raises(DataFormatError, match=message):
            question_benchmark(name, path).load()

    def test_the_right_choice_of_gpqa_is_not_always_the_first(self, tmp_path: Path) -> None:
        rows = [{**GPQA, "Record ID": f"r{i}", "Question": f"Which metal {i}?"} for i in range(12)]
        builder = question_benchmark("gpqa", write(tmp_path / "rows.jsonl", *rows))
        items = builder.load()
        assert {item.reference for item in items} == set("ABCD")
        assert items == builder.load()  # the same order each time
        for item in items:
            assert f"({item.reference}) gold" in item.question and set(item.wrong_answers) == set("ABCD") - {
                item.reference
            }

    def test_questions_with_errors_are_left_out_of_mmlu_redux(self, tmp_path: Path) -> None:
        row = ROWS["mmlu_redux"][0]
        path = write(tmp_path / "rows.jsonl", row, {**row, "error_type": "wrong_groundtruth"})
        assert len(question_benchmark("mmlu_redux", path).load()) == 1
        with pytest.raises(ConfigurationError, match="has no items"):
            question_benchmark("mmlu_redux", write(tmp_path / "bad.jsonl", {**row, "error_type": "x"})).load()

    def test_a_limit_takes_the_first_or_a_seeded_choice(self, tmp_path: Path) -> None:
        rows = [{**ROWS["mmlu_pro"][0], "question_id": i} for i in range(30)]
        drawn = [item.id for item in question_benchmark("mmlu_pro", write(tmp_path / "a.jsonl", *rows)).load(5)]
        assert drawn == [item.id for item in question_benchmark("mmlu_pro", str(tmp_path / "a.jsonl")).load(5)]
        assert drawn != [f"mmlu_pro_{i}" for i in range(5)]
        path = write(tmp_path / "b.jsonl", *[{**AIME, "problem_idx": i} for i in range(9)])
        assert [item.id for item in question_benchmark("aime", path).load(2)] == ["aime_0", "aime_1"]

    def test_all_configurations_of_the_hub_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[Any, ...]] = []

        def load(*arguments: Any) -> list[dict[str, Any]]:
            asked.append(arguments)
            return [ROWS["ceval"][0]]

        monkeypatch.setattr(hub, "load", load)
        builder = get_benchmark("ceval")
        assert isinstance(builder, QuestionBenchmark)
        assert [item.id for item in builder.load()] == [f"ceval_{subject}_0" for subject in SUBJECTS]
        assert asked[0] == ("ceval/ceval-exam", "val", "accountant") and len(asked) == 52


class TestPrograms:
    @pytest.mark.parametrize(
        ("code", "right"),
        [
            ("def f(x): return x + x", True),
            ("def f(x): return x + 2", False),
            ("import sys; sys.exit(0)", False),
            ("import os; os._exit(0)", False),
            ("def f(x): return 2 * x\nprint('done')", True),
            ("def f(x:", False),
            ("", False),
        ],
    )
    def test_only_a_program_that_passes_every_test_is_right(self, code: str, right: bool, tmp_path: Path) -> None:
        builder = question_benchmark("mbpp", write(tmp_path / "rows.jsonl", MBPP))
        assert graded(builder, builder.load()[0], f"```python\n{code}\n```").correct is right

    def test_an_endless_program_is_ended(self, tmp_path: Path) -> None:
        keys = SandboxKeys(sandbox="unsafe_subprocess", memory_mb=4096, wall_s=1.0)
        builder = MBPPBenchmarkBuilder(write(tmp_path / "rows.jsonl", MBPP), keys)
        result = graded(builder, builder.load()[0], "while True: pass")
        assert not result.correct and result.metrics == {"timed_out": 1.0}


class TestIFBench:
    class Checker:
        """Stands for the authors' checkers: a reply must have a word, or repeat the prompt."""

        def __init__(self, kind: str) -> None:
            self.kind, self.asked = kind, dict[str, Any]()

        def build_description(self, **asked: Any) -> None:
            self.asked = {"prompt": None, **asked} if self.kind == "copy:prompt" else asked

        def get_instruction_args(self) -> dict[str, Any] | None:
            return self.asked or None

        def check_following(self, text: str) -> bool:
            if self.kind == "copy:prompt":
                return text == self.asked["prompt"]
            return self.asked["word"] == text.split()[1]

    ROW: ClassVar = {
        "key": "7",
        "prompt": "one two",
        "instruction_id_list": ["words:second", "copy:prompt"],
        "kwargs": [{"word": "two", "n": None}, {"word": None}],
    }

    @pytest.fixture
    def builder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuestionBenchmark:
        module = ModuleType(ifbench.CHECKERS_MODULE)
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module)["INSTRUCTION_DICT"] = dict.fromkeys(("words:second", "copy:prompt"), self.Checker)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return question_benchmark("ifbench", write(tmp_path / "rows.jsonl", self.ROW))

    @pytest.mark.parametrize(("reply", "fraction"), [("one two", 1.0), ("a two", 0.5), ("one", 0.0), (" ", 0.0)])
    def test_the_authors_checkers_grade(self, builder: QuestionBenchmark, reply: str, fraction: float) -> None:
        (item,) = builder.load()
        result = graded(builder, item, reply)
        assert result.metrics["fraction"] == fraction and result.correct is (fraction == 1)

    def test_a_kind_that_they_do_not_have(self, builder: QuestionBenchmark, tmp_path: Path) -> None:
        write(tmp_path / "rows.jsonl", {**self.ROW, "instruction_id_list": ["words:third", "copy:prompt"]})
        with pytest.raises(DataFormatError, match="'words:third' has no checker in the package ifbench"):
            builder.load()


class TestNames:
    @pytest.mark.parametrize(("name", "near"), [("gsm8", "gsm8k"), ("MMLU-Pro", "mmlu_pro"), ("math-500", "math500")])
    def test_an_unknown_name_is_answered_with_close_ones(self, name: str, near: str) -> None:
        with pytest.raises(BenchmarkNotFoundError, match=rf"did you mean .*{near}"):
            get_benchmark(name)

    def test_what_is_not_here_is_refused(self) -> None:
        with pytest.raises(BenchmarkNotFoundError, match=r"'zzz' is unknown: must be .*aime, .*supergpqa"):
            get_benchmark("zzz")
        with pytest.raises(ConfigurationError, match=r"gsm8k reads a \.jsonl"):
            get_benchmark("gsm8k", "rows.txt")
        with pytest.raises(ConfigurationError, match="taken"):
            register(GSM8KBenchmarkBuilder())

    def test_names_files_and_tasks(self) -> None:
        named = find_benchmark("gsm8k/my/rows.jsonl")
        assert isinstance(named, GSM8KBenchmarkBuilder) and named.dataset_path == "my/rows.jsonl"
        assert REGISTRY["gsm8k"] is find_benchmark("gsm8k") and find_benchmark("qa/arithmetic") is None

    def test_every_exported_name_can_be_imported(self) -> None:
        for module in (benchmarks, evaluation):
            for name in module.__all__:
                getattr(module, name)
