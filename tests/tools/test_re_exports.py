"""The modules that only show names are what the table makes of them."""

import ast
import importlib

import pytest

from tests.child import ROOT
from tools import re_exports
from tools.re_exports import TABLE, main, place, source


@pytest.mark.parametrize("module", TABLE)
def test_a_module_is_what_the_table_says(module: str) -> None:
    assert place(module).read_text() == source(TABLE[module]), "python -m tools.re_exports writes it"
    shown = importlib.import_module(module)
    homes = {name: home for home, names in TABLE[module].items() for name in names.split()}
    assert sorted(shown.__all__) == sorted(homes)
    for name, home in homes.items():
        assert getattr(shown, name) is getattr(importlib.import_module(home), name)


def test_every_module_that_holds_nothing_of_its_own_is_in_the_table() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "tinker_cookbook").rglob("*.py")
        if (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("Re-exports")
    }
    # It can be run as well, with keys of its own.
    assert found - {"tinker_cookbook.eval.run_inspect_evals"} == set(TABLE)


def test_a_stale_module_is_named_and_written_anew(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(re_exports, "ROOT", tmp_path)
    monkeypatch.setattr(re_exports, "TABLE", {"shown": {"json": "loads dumps", "os": "sep"}})
    assert main(["--check"]) == 1 and "stale: shown" in capsys.readouterr().out
    assert main([]) == 0 and main(["--check"]) == 0
    assert place("shown").read_text().endswith('__all__ = ["dumps", "loads", "sep"]\n')
