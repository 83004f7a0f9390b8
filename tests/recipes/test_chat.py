"""What must hold of the chat: it answers lines from a pipe, obeys its commands, and finds weights and renderer by itself."""

import gc
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipes import chat, rl_basic
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.runs.checkpoints import last_sampler_path

TINY = str(EXAMPLE_DATA / "tiny_chat")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "400")
    gc.collect()  # lets go of a client that an earlier test left behind, whose home is another


class Talk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, lines: list[str], *argv: str, recipe: ModuleType = chat) -> list[str]:
        """What is printed, without the greeting."""
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        self.capsys.readouterr()
        run_recipe(recipe.CLIConfig, recipe.main, argv=list(argv))
        return self.capsys.readouterr().out.splitlines()[1:]

    def error(self, *argv: str) -> str:
        with pytest.raises(SystemExit) as exit_code:
            self([], *argv)
        assert exit_code.value.code == 2
        return self.capsys.readouterr().err


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(monkeypatch, capsys)


class TestLines:
    def test_it_answers_and_a_seed_repeats_it(self, talk: Talk) -> None:
        lines = ["What is 2 + 3?", "", "What is 4 + 4?"]
        first, second = (talk(lines, "seed=3", "temperature=1") for _ in range(2))
        assert first == second and len(first) == 2
        assert all(line.startswith("assistant> ") for line in first)

    def test_a_later_line_sees_the_earlier_ones_until_reset(self, talk: Talk) -> None:
        fresh = talk(["Hello", "/logprobs"], "temperature=0")
        again = talk(["What is 2 + 3?", "/reset", "Hello"], "temperature=0")
        assert again[2] == fresh[0]
        assert "0 messages" in again[1] and "2 messages" in fresh[1]

    def test_commands_change_the_settings(self, talk: Talk) -> None:
        shown = talk(["/temperature 0.25", "/max_tokens 3", "/system Be brief.", "/logprobs", "/system", "/help"])
        assert "temperature 0.25" in shown[0] and "max_tokens 3" in shown[1] and "'Be brief.'" in shown[2]
        assert "logprobs on" in shown[3] and "system none" in shown[4] and any("/quit" in line for line in shown[5:])

    def test_quit_leaves(self, talk: Talk) -> None:
        assert talk(["/quit", "Hello"]) == []

    def test_a_mistake_is_told_and_the_chat_goes_on(self, talk: Talk) -> None:
        mistakes = [
            "/temperature -1",
            "/temperature hot",
            "/max_tokens 0",
            "/max_tokens inf",
            "/max_tokens 2.7",
            "/nothing",
        ]
        shown = talk([*mistakes, "Hello"], "temperature=0")
        assert [line.split(":")[0] for line in shown[: len(mistakes)]] == ["error"] * len(mistakes)
        assert shown[-1].startswith("assistant> ")

    def test_a_line_that_is_too_long_is_not_remembered(self, talk: Talk) -> None:
        shown = talk(["a b " * 3000, "Hello"], "temperature=0")
        assert "leaves no room" in shown[0] and shown[1] == talk(["Hello"], "temperature=0")[0]

    def test_a_cut_off_reply_says_so(self, talk: Talk) -> None:
        assert "cut off after 2 tokens" in talk(["Hello"], "max_tokens=2", "temperature=0")[1]

    def test_logprobs_are_one_per_token_and_add_up(self, talk: Talk) -> None:
        shown = talk(["Hello"], "logprobs=True", "temperature=0")
        logprobs = [float(part.split("]")[0]) for part in shown[1].split("[")[1:]]
        total, count = shown[2].split()[1], int(shown[2].split()[3])
        assert len(logprobs) == count and sum(logprobs) == pytest.approx(float(total), abs=0.01 * count)


class TestWeights:
    def test_a_run_and_its_checkpoint_are_the_trained_weights(self, talk: Talk, tmp_path: Path) -> None:
        small = ["groups_per_batch=2", "group_size=4", "max_steps=1", "num_test=2", "max_tokens=12", "eval_every=0"]
        options = [*small, f"log_path={tmp_path / 'run'}", "learning_rate=0.05", "on_zero_advantages=skip"]
        talk([], *options, recipe=rl_basic)
        path = last_sampler_path(tmp_path / "run")
        by_folder = talk(
            ["What is 2 + 3?", "/logprobs"], f"log_path={tmp_path / 'run'}", "temperature=0", "logprobs=True"
        )
        by_path = talk(["What is 2 + 3?", "/logprobs"], f"model_path={path}", "temperature=0", "logprobs=True")
        base = talk(["What is 2 + 3?", "/logprobs"], f"model_name={TINY}", "temperature=0", "logprobs=True")
        note, *by_folder = by_folder
        assert by_folder == by_path != base
        assert note == f"the run trained under the system prompt {QA_SYSTEM!r}; run_system=True takes it"
        taken = talk(["/logprobs"], f"log_path={tmp_path / 'run'}", "run_system=True")
        assert len(taken) == 1 and QA_SYSTEM in taken[0]


class TestSystemPrompts:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "run_metadata.json").write_text(json.dumps({"system_prompt": "Be brief."}))
        return tmp_path

    def test_it_is_taken_or_shown(self, run: Path) -> None:
        for cli, expected in [
            (chat.CLIConfig(log_path=str(run)), (None, "Be brief.")),
            (chat.CLIConfig(log_path=str(run), system="Rhyme."), ("Rhyme.", "Be brief.")),
            (chat.CLIConfig(log_path=str(run), run_system=True), ("Be brief.", "Be brief.")),
            (chat.CLIConfig(log_path=str(run / "none"), system="Rhyme."), ("Rhyme.", None)),
            (chat.CLIConfig(system="Rhyme."), ("Rhyme.", None)),
        ]:
            assert chat.settle_system(cli) == expected

    def test_what_cannot_be_taken(self, talk: Talk, run: Path) -> None:
        assert "no log_path is given; set system=" in talk.error("run_system=True")
        assert "give one of them" in talk.error("run_system=True", "system=Rhyme.", f"log_path={run}")
        (run / "run_metadata.json").write_text("{}")
        assert "has none; set system=" in talk.error("run_system=True", f"log_path={run}")


class TestRefusals:
    def test_weights_are_named_once(self, talk: Talk, tmp_path: Path) -> None:
        assert "give one of" in talk.error("model_name=tiny_chat", f"log_path={tmp_path}")
        assert "not a path of sampler weights" in talk.error(f"model_path={tmp_path}")

    def test_a_folder_without_checkpoints(self, talk: Talk, tmp_path: Path) -> None:
        assert "no such folder" in talk.error(f"log_path={tmp_path / 'none'}")
        (tmp_path / "checkpoints.jsonl").write_text(
            json.dumps({"name": "a", "batch": 1, "state_path": "tinker://a/b/c"})
        )
        assert "no checkpoint to sample from" in talk.error(f"log_path={tmp_path}")

    def test_bad_settings(self, talk: Talk) -> None:
        assert "temperature" in talk.error("temperature=-1")
        assert "max_tokens: must be greater than 0, got 0" in talk.error("max_tokens=0")
        assert "renderer" in talk.error("renderer_name=nothing_such")
