"""Renamed keys in command lines and in files of keys are rewritten, and nothing else is."""

import io
from pathlib import Path

import pytest

from tools import migrate


def run(text: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    migrate.main(list(arguments))
    return list(capsys.readouterr())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python -m recipes.math_rl largest=9 seed=1", "python -m recipes.math_rl env.largest=9 seed=1"),
        ("python -m recipes math_rl --largest=9", "python -m recipes math_rl --env.largest=9"),
        ("tinker-recipes guess_number highest=9", "tinker-recipes guess_number env.highest=9"),
        (
            "python -m recipes.guess_number \\\n    highest=100 max_turns=7  # hints",
            "python -m recipes.guess_number \\\n    env.highest=100 env.max_turns=7  # hints",
        ),
        ("largest=9 python -m recipes.math_rl", "largest=9 python -m recipes.math_rl"),
        ("python -m recipes.rl env.highest=9", "python -m recipes.rl env.highest=9"),
        ("python -m recipes.env_rl max_answer_tokens=9", "python -m recipes.rl max_tokens=9"),
        ("python -m recipes.sl_basic largest=9", "python -m recipes.sl_basic largest=9"),
        (
            "python -m recipes.sweep recipe=recipes.math_rl grid.largest=9,20 set.grading=exact processes=2",
            "python -m recipes.sweep recipe=recipes.math_rl grid.env.largest=9,20 set.env.grading=exact processes=2",
        ),
        (
            'python -m recipes.compare recipes.a="recipes.single_turn max_eval_items=4 baseline=mean"',
            'python -m recipes.compare recipes.a="recipes.single_turn num_test=4 advantage.baseline=mean"',
        ),
        ("python -m recipes.distillation.sdft max_test_items=4", "python -m recipes.distillation.sdft test_size=4"),
        (
            "python -m tinker_cookbook.recipes.preference.rlhf_pipeline sft_epochs=1",
            "python -m tinker_cookbook.recipes.preference.rlhf_pipeline sft.num_epochs=1",
        ),
    ],
)
def test_command_lines(old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, told = run(f"# largest=1\n{old}\n", monkeypatch=monkeypatch, capsys=capsys)
    assert out == f"# largest=1\n{new}\n"
    assert (told == "") == (old == new)


def test_files_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("program: recipes/math_rl.py\nparameters:\n  largest:\n    values: [9, 20]\n  seed: {value: 1}\n")
    keys = tmp_path / "keys.toml"
    keys.write_text('largest = 9\ngrading = "exact"\n')
    out, told = run("", str(sweep), monkeypatch=monkeypatch, capsys=capsys)
    assert out == sweep.read_text().replace("largest", "env.largest")
    assert told == f"{sweep}: math_rl: largest is now env.largest\n"
    assert run("", str(keys), monkeypatch=monkeypatch, capsys=capsys) == [keys.read_text(), ""]
    out, _ = run("", "--recipe", "math_rl", str(keys), monkeypatch=monkeypatch, capsys=capsys)
    assert out == 'env.largest = 9\nenv.grading = "exact"\n'


def test_what_only_a_person_can_rewrite_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "python -m recipes.rl_basic rollout_timeout=3\n"
    out, told = run(line, monkeypatch=monkeypatch, capsys=capsys)
    assert out == line and "rollout_timeout is now rollout_error_tolerance.per_rollout_timeout, with" in told
    assert "rewrite it by hand" in told


@pytest.mark.parametrize("arguments", [["--recipe", "chess"], ["nowhere.toml"]])
def test_mistakes_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        migrate.main(arguments)
    assert raised.value.code == 2
    assert "does not exist" in capsys.readouterr().err
