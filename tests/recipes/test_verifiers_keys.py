"""Keys of verifiers_rl that are divided by dots become nested settings, whichever part they are of."""

from typing import Any

import pytest

from recipes import verifiers_rl
from tinker_cookbook.cli_utils import parse


def test_dots_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    monkeypatch.setattr(verifiers_rl, "dataset_of", lambda cli, env: None)
    monkeypatch.setattr(verifiers_rl, "VerifiersEnvironment", lambda **given: made.append(given))
    monkeypatch.setattr(verifiers_rl.CLIConfig, "fill", lambda self, cls, **given: cls(**given))
    keys = ["taskset=sums.py", "taskset.task.url=here", "taskset.game=x", "verifiers.solver.max_turns=3"]
    verifiers_rl.make_dataset_builder(parse(verifiers_rl.CLIConfig, keys))
    (given,) = made
    assert given["taskset_args"] == {"task": {"url": "here"}, "game": "x"}
    assert given["verifiers_args"] == {"solver": {"max_turns": 3}} and given["test_taskset_args"] is None
