"""IFBench: 300 prompts with 58 kinds of verifiable instructions (Pyatkin et al. 2025), graded by its authors' checkers."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.eval.benchmarks.ifeval import IFEvalBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.instructions import Arguments
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

CHECKERS_MODULE = "instructions_registry"
"""Module of the authors' package; its `INSTRUCTION_DICT` has the checkers by kind."""


class IFBenchBenchmarkBuilder(IFEvalBenchmarkBuilder):
    """Like IFEval, with the checkers of the authors' package, which has to be installed. If a checker raises on a reply, the
    instruction counts as not followed.
    """

    name = "ifbench"
    repository = "allenai/IFBench_test"

    def check(self) -> None:
        if importlib.util.find_spec(CHECKERS_MODULE) is None:
            raise ConfigurationError(
                f"benchmark {self.name} needs its authors' checkers: "
                "pip install 'ifbench @ git+https://github.com/allenai/IFBench.git'"
            )

    def load(self, max_items: int | None = None) -> list[TaskItem]:
        """As in the base class; also raises ConfigurationError if the checkers are not installed."""
        self.check()
        return super().load(max_items)

    def check_kinds(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if kind not in _checkers():
                raise DataFormatError(f"instruction {kind!r} has no checker in the package ifbench")

    def follows(self, item: TaskItem, text: str, kind: str, asked: Arguments) -> bool:
        if not text.strip():
            return False
        checker = _checkers()[kind](kind)
        checker.build_description(**asked)
        arguments = checker.get_instruction_args()
        if arguments and "prompt" in arguments:
            checker.build_description(prompt=item.question)
        try:
            return bool(checker.check_following(text))
        except Exception:
            return False


def _checkers() -> Any:
    return importlib.import_module(CHECKERS_MODULE).INSTRUCTION_DICT
