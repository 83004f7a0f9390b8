"""Deprecation, the state of the code, coloured tokens, and names that are looked up."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers.testing_utils import extract_token_ids
from tinker_cookbook.utils import deprecation
from tinker_cookbook.utils.code_state import code_state
from tinker_cookbook.utils.deprecation import deprecated, make_deprecated_module_getattr, warn_deprecated
from tinker_cookbook.utils.format_colorized import format_colorized
from tinker_cookbook.utils.misc_utils import dict_mean, iteration_dir, lookup_func


class TestDeprecation:
    def test_functions_and_classes_warn_where_they_are_used_and_still_work(self) -> None:
        @deprecated
        def old(a: int) -> int:
            """Doubles."""
            return 2 * a

        @deprecated(message="Use New.", removal_version="99.0")
        class Old:
            def __init__(self, a: int) -> None:
                self.a = a

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert old(3) == 6 and Old(4).a == 4 and isinstance(Old(5), Old)
        assert old.__doc__ == "Doubles." and [entry.category for entry in found] == [DeprecationWarning] * 3
        assert str(found[0].message).startswith("'Function ") and "old' is deprecated." in str(found[0].message)
        assert str(found[1].message).endswith("Old' is deprecated. It will be removed in version 99.0. Use New.")
        assert {entry.filename for entry in found} == {__file__}

    @pytest.mark.parametrize(
        ("now", "removed"), [("1.2.0", True), ("1.10", True), ("1.1.9", False), ("unknown", False)]
    )
    def test_from_its_last_version_on_it_is_an_error(
        self, now: str, removed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deprecation, "installed_version", lambda: now)
        with pytest.raises(RuntimeError if removed else DeprecationWarning), warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_deprecated("a", removal_version="1.2.0")

    def test_a_name_that_has_moved(self) -> None:
        get = make_deprecated_module_getattr("m", {"dumps": ("json.dumps", None), "bad": ("nowhere", None)})
        with pytest.warns(DeprecationWarning, match=r"'m\.dumps' is deprecated\. Use json\.dumps instead"):
            assert get("dumps")([1]) == "[1]"
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            get("other")
        with pytest.raises(ValueError, match=r"must be package\.module\.Name"):
            get("bad")


def test_the_state_of_the_code_is_its_commit_and_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path / "r", capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "r" / "kept_in_git").mkdir(parents=True)
    (tmp_path / "r" / "kept_in_git" / "__init__.py").write_text("A = 1\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*arguments)
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "r"))
    monkeypatch.syspath_prepend(str(tmp_path))
    head = f"### repo: {(tmp_path / 'r').resolve()} @ {git('rev-parse', 'HEAD')}\nmodules: kept_in_git\n"
    assert code_state(["kept_in_git"]) == head + "(no local changes)\n"
    (tmp_path / "r" / "kept_in_git" / "__init__.py").write_text("A = 2\n")
    import kept_in_git  # pyright: ignore[reportMissingImports]

    state = code_state([kept_in_git, "alone"])
    assert state.startswith(head) and "-A = 1\n+A = 2\n" in state
    assert "### module: alone (not in a git repository)" in state
    for name in ("kept_in_git", "alone"):
        sys.modules.pop(name, None)
    with pytest.raises(ImportError, match="has no file"):
        code_state([ModuleType("made_up")])


class Letters:
    """A token for each letter; two of them for é, which only come out whole together."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def test_tokens_are_coloured_by_the_sign_of_their_weights() -> None:
    tokens = list("aé\nb".encode())
    shown = format_colorized(tokens, [1, 0, 0, 0, -2], Letters())  # pyright: ignore[reportArgumentType]
    assert shown == "\033[32ma\033[0m\033[33mé\n\033[0m\033[31mb\033[0m"
    arrows = format_colorized(tokens, [1] * 5, Letters(), draw_newline_arrow=True)  # pyright: ignore[reportArgumentType]
    assert arrows == "\033[32maé↵\n\033[0m\033[32mb\033[0m"
    with pytest.raises(ValueError, match="5 tokens and 1 weights"):
        format_colorized(tokens, [1], Letters())  # pyright: ignore[reportArgumentType]


def test_names_folders_and_means() -> None:
    assert lookup_func("json:dumps")([1]) == lookup_func("dumps", "json")([1]) == "[1]"
    for bad in ("dumps", "a:b:c", ":dumps", "json:"):
        with pytest.raises(ConfigurationError, match="path_to_func"):
            lookup_func(bad)
    assert iteration_dir("a", 12) == Path("a/iteration_000012")
    assert iteration_dir(None, 1) is iteration_dir("", 1) is None
    assert dict_mean([{"a": 1.0, "b": None}, {"a": 3.0, "c": None}, {"b": 5}]) == {"a": 2.0, "b": 5.0}
    assert extract_token_ids([1, 2]) == [1, 2]
