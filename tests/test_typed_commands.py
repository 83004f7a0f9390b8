"""The command lines of the earlier runbooks and guides, word for word: each runs, with small settings, or is told what to type.

What is the system's own (`python -m venv`, `nvidia-smi`, `export`) is not among them.
"""

import json
import os
import re
import runpy
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tests.child import ROOT
from tests.engine.conftest import TINY_CHAT
from tests.hub_articles import stand_in_for_the_hub
from tests.waiting import HANG_SECONDS
from tinker_cookbook.env import known_envs
from tinker_cookbook.utils.files import read_jsonl

TRAIN = "./tinker-local/bin/with_local_tinker python3 -u scripts/train.py --no-proxy "
RUNS = {
    "debate": TRAIN + "--mode debate --env qa --dataset test -n 256 --num-groups 4 -s 10 --seed 0 --mock-judge "
    "--name local_debate_smoke",
    "debate, rejection": TRAIN + "--mode debate --env qa --dataset test -n 32 --num-groups 2 -s 1 --mock-judge "
    "--debate-train rejection --name smoke_debate_rejection",
    "debate, RS to GRPO": TRAIN + "--mode debate --env summary --dataset cnn_dailymail --reward-fn compression -n 64 "
    "--num-groups 4 -s 10 --mock-judge --debate-train rs_grpo --debate-grpo-reward task --name mini_debate_rs_grpo_summary",
    "single-turn QA": TRAIN + "--mode single_turn --env qa --dataset test -n 16 -s 1 --name smoke_normal_qa",
    "single-turn summary": TRAIN + "--mode single_turn --env summary --dataset cnn_dailymail --reward-fn compression "
    "-n 16 -s 1 --name smoke_normal_summary",
    "sampling settings": TRAIN + "--mode single_turn --env summary --temperature 0.7 --max-tokens 16 --min-p 0.05 -n 16 -s 1",
    "as keys": "python -m recipes.debate_rs_grpo -n 256 --num-groups 4 -s 10 --name in_keys log_path=logs/in_keys",
}  # fmt: skip
SMALL_FLAGS = {"-n": "16", "--num-groups": "2"}
SMALL_KEYS = ("lora_rank=4", "num_test=2", "eval_every=0", "on_zero_advantages=skip")
GUIDE = {
    "sl_basic": "python -m tinker_cookbook.recipes.sl_basic model_name=meta-llama/Llama-3.2-1B "
    "log_path=/tmp/tinker-examples/sl_basic",
    "sl_basic on a file": "python -m tinker_cookbook.recipes.sl_basic dataset_path=/path/to/conversations.jsonl "
    "renderer_name=role_colon train_on_what=all_assistant_messages log_path=/tmp/tinker-examples/sl_jsonl",
    "rl_basic": "python -m tinker_cookbook.recipes.rl_basic model_name=meta-llama/Llama-3.1-8B "
    "log_path=/tmp/tinker-examples/rl_basic",
    "DPO": "python -m tinker_cookbook.recipes.preference.train log_path=/tmp/dpo-run model_name=meta-llama/Llama-3.2-1B "
    "dataset=<preference_dataset> renderer_name=role_colon learning_rate=1e-5 dpo_beta=0.1",
    "an experiment": "python run_experiment.py configs/train_ghost.toml",
}  # fmt: skip
GUIDE_KEYS = {
    "sl_basic": ("max_steps=2", "batch_size=4", "lora_rank=4"),
    "sl_basic on a file": ("max_steps=2", "batch_size=4", "lora_rank=4"),
    "rl_basic": ("max_steps=1", "groups_per_batch=4", "num_test=4", "lora_rank=4", "on_zero_advantages=skip"),
    "DPO": ("max_steps=2", "batch_size=4", "lora_rank=4"),
    "an experiment": ("trainer.max_steps=1", "trainer.groups_per_batch=2", "trainer.lora_rank=4"),
}
THERE = {"/path/to/conversations.jsonl": str(ROOT / "example_data" / "conversations.jsonl"),
         "<preference_dataset>": str(ROOT / "example_data" / "comparisons.jsonl")}  # fmt: skip
ANSWERED = {
    "python3 scripts/train.py -n 16": "give --mode debate or --mode single_turn",
    "python3 scripts/train.py --mode chat": "give --mode debate or --mode single_turn",
    "python3 scripts/train.py --mode debate --proxy-port 1": "'--proxy-port' is not known; there are --mode",
    "python3 scripts/check_local_sampling_logprobs.py --model-path x": "'--model-path' is not known; there are --model",
    "python -m recipes.single_turn --mode debate -n 8": "run python -m recipes.debate_rs_grpo num_rollouts=8",
    "python -m recipes.rl_basic -n 8": "type python -m recipes.rl_basic groups_per_batch=1 group_size=8",
    "python -m recipes.guess_number -n 8 --num-groups 2": "type python -m recipes.guess_number group_size=4 groups_per_batch=2",
    "python -m recipes.rl_basic baseline=mean": "baseline=mean: this key is now advantage.baseline",
    "python -m tinker_cookbook.eval.run_inspect_evals model_path=tinker://YOUR_MODEL model_name=meta-llama/Llama-3.2-1B "
    "tasks=<inspect_task_id> renderer_name=role_colon": r"model_path|inspect-ai is not installed. Install it with pip install",
}  # fmt: skip
"""Line -> what its answer says."""
ROWS = {
    "pytest tinker_cookbook/tests/test_renderers.py": "pytest tests/renderers",
    "pytest tinker_cookbook/tests/test_utils.py": "pytest tests/utils",
    "pytest tests/smoke_tests.py": "pytest tests/recipes/test_smoke.py",
}
"""Line -> what docs/runbooks.md says to type in its place."""
INSTALLED = {
    "python3 -m pip install datasets": "pip install -e .",
    "pip install tinker": "pip install -e .",
    "pip install -e .[dev]": "pip install -c constraints.txt -e '.[dev]'",
    "uv pip install -e .[dev]": "pip install -c constraints.txt -e '.[dev]'",
    "pip install -e custom_utils": "pip install -e .",
    "pip install -e environments/ghost_trace": "pip install -e .",
    "pip install -e environments/self_prediction": "pip install -e .",
    "pip install -e environments/gradient_prophet": "pip install -e .",
}
"""Line that installs -> what the row of docs/runbooks.md that has it says to type."""


@pytest.fixture(autouse=True)
def a_machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TINKER_")]:
        monkeypatch.delenv(name)
    for name, value in {"TINKER_BACKEND": "local", "TINKER_DEBATE_LOG_ROOT": "x"}.items():
        monkeypatch.setenv(name, value)  # what a command sets is taken back, too
    monkeypatch.delenv("TINKER_DEBATE_LOG_ROOT")
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_LOCAL_BACKEND", "transformers")
    monkeypatch.setenv("TINKER_DEBATE_BASE_MODEL", str(TINY_CHAT))
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "example_data"):
        (tmp_path / name).symlink_to(ROOT / name)
    stand_in_for_the_hub(monkeypatch)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Runs the words of a line in this process, as python would, without the programs that only set variables."""

    def run(words: list[str]) -> None:
        words = [word for word in words if word != "./tinker-local/bin/with_local_tinker"]
        words = [word for word in words[1:] if word != "-u"]
        program, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        if words[0] == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")

    return run


def small(words: list[str]) -> Iterator[str]:
    """With fewer rollouts and steps."""
    for before, word in zip(["", *words], words, strict=False):
        steps = "2" if word == "10" else word
        yield SMALL_FLAGS.get(before, steps if before == "-s" else word)


SLOW = {
    "debate",
    "as keys",
    "an experiment",
    "debate, RS to GRPO",
    "debate, rejection",
    "single-turn QA",
    "single-turn summary",
    "sl_basic on a file",
    "sl_basic",
}


def names(lines: dict[str, str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in lines]


@pytest.mark.parametrize("name", names(RUNS))
def test_a_run_of_the_runbooks(
    name: str, typed: Callable[[list[str]], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = list(small(shlex.split(RUNS[name])))
    own = () if "--max-tokens" in words else ("max_tokens=32",)
    typed([*words, *SMALL_KEYS, *own])
    out, err = capfd.readouterr()
    assert re.search(r"^Runs: python -m recipes\.\w+ .*num_rollouts=16", out, re.MULTILINE)
    (folder,) = (tmp_path / "logs").iterdir()
    asked = words[words.index("--name") + 1] if "--name" in words else ""
    assert folder.name.endswith(asked) and json.loads((folder / "run_metadata.json").read_text())["argv"]
    steps = sorted(folder.glob("training_step_*.json"))
    assert len(steps) == len([row for row in read_jsonl(folder / "metrics.jsonl") if "groups/sampled" in row]) > 0
    assert all(f"Logged: {Path('logs', folder.name, step.name)}" in err for step in steps)
    records = [json.loads(step.read_text()) for step in steps]
    trained = [datum for record in records for datum in record["training_data"]]
    assert len(trained) == sum(record["num_datums"] for record in records) > 0
    for datum in trained:
        lengths = {len(datum[f"completion_{kind}"]) for kind in ("tokens", "logprobs", "advantages")}
        assert len(lengths) == 1 and min(lengths) > 0 and datum["prompt_tokens"]
        assert {"reward", "centered_reward"} <= datum["metadata"].keys()
    assert any("loss:sum" in record["results"]["metrics"] for record in records)
    assert re.search(r"Training data: [1-9]\d* datums\. Advantage stats \(nonzero\): count [1-9]", err)
    assert re.search(r"loss=\S+  tokens=[1-9]", out + err)
    kinds = {"single-turn QA": "baseline", "single-turn summary": "summary", "sampling settings": "summary"}
    kind = kinds.get(name, "debate")
    assert len([*folder.glob(f"{kind}_*.json")]) >= len(steps)
    if kind == "debate":
        assert "[debate] Round 1: 16 replies, [debate] Round 2: 16, [debate] Round 3: 16" in err


@pytest.mark.parametrize("name", names(GUIDE))
def test_a_run_of_the_guides(name: str, typed: Callable[[list[str]], None], tmp_path: Path) -> None:
    """On the shipped model and data, in a folder of the test."""
    words = shlex.split(GUIDE[name])
    for i, word in enumerate(words):
        key, _, value = word.partition("=")
        chosen = {"model_name": str(TINY_CHAT), "log_path": str(tmp_path / "run")}.get(key, THERE.get(value, value))
        words[i] = f"{key}={chosen}" if "=" in word else word
    if name == "an experiment":
        words.append(f"output_dir={tmp_path / 'run'}")
    typed([*words, *GUIDE_KEYS[name]])
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) >= 1


@pytest.mark.parametrize("line", ANSWERED)
def test_a_line_that_is_answered(
    line: str, typed: Callable[[list[str]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        typed(shlex.split(line))
    err = capfd.readouterr().err
    assert raised.value.code == 2 and re.search(ANSWERED[line], err) and len(err.splitlines()) <= 2, err


@pytest.mark.parametrize("line", ROWS)
def test_a_line_that_has_a_row(line: str) -> None:
    said = ROWS[line]
    assert f"`{said}`" in (ROOT / "docs" / "runbooks.md").read_text() and (ROOT / said.split()[1]).exists()


@pytest.mark.parametrize("line", INSTALLED)
def test_a_line_that_installs_has_a_row(line: str) -> None:
    """And what the row says to install has what the line asks for: a dependency, an extra, or a part of the library."""
    rows = [row.split(" | ", 1) for row in (ROOT / "docs" / "runbooks.md").read_text().splitlines() if row[:2] == "| "]
    ((_, here),) = [row for row in rows if f"`{line}`" in row[0]]
    assert f"`{INSTALLED[line]}`" in here
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    what = line.split()[-1]
    if what == ".[dev]":
        assert project["optional-dependencies"]["dev"] and (ROOT / "constraints.txt").is_file()
    elif "-e" in line.split():
        assert not (ROOT / what).exists()  # nothing to install there
        assert what == "custom_utils" or what.partition("/")[2] in known_envs()
    else:
        assert what in {re.split("[^a-z]", name)[0] for name in project["dependencies"]}


def shell(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A real process at the root, with this environment's python3 and nothing of the user's settings."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": path, "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.slow
def test_the_check_of_logprobs_through_the_wrapper(tmp_path: Path) -> None:
    wrapped = "./tinker-local/bin/with_local_tinker python3 -u scripts/check_local_sampling_logprobs.py"
    line = f'{wrapped} --max-tokens 32 --prompt "What is 7 * 8?"'
    done = shell(
        *shlex.split(line),
        "num_samples=1",
        "temperatures=0.7",
        TINKER_LOCAL_HOME=str(tmp_path),
        TINKER_DEBATE_BASE_MODEL=str(TINY_CHAT),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines[0].startswith("Runs: python -m tinker_local_backend.check_logprobs max_tokens=32") and lines[-1] == "ok"
    )
    assert any(line.startswith("max_abs_diff=") for line in lines)


def test_the_wrapper_sets_what_it_says_and_no_more() -> None:
    """Also as `bash tinker-local/bin/with_local_tinker`."""
    program = "import os; print(os.environ['TINKER_BACKEND'], os.environ['PYTHONPATH'])"
    wrapper = "tinker-local/bin/with_local_tinker"
    assert (ROOT / wrapper).stat().st_mode & stat.S_IXUSR
    for words in ([f"./{wrapper}"], ["bash", wrapper]):
        done = shell(*words, "python3", "-S", "-c", program, PYTHONPATH="/before")
        assert done.stdout == f"local {ROOT}:/before\n", done.stderr
    assert shell(f"./{wrapper}").returncode == 2


def test_the_scripts_compile() -> None:
    for path in (ROOT / "scripts").glob("*.py"):
        assert (
            shell("python3", "-S", "-c", f"compile(open({str(path)!r}).read(), {path.name!r}, 'exec')").returncode == 0
        )
    done = shell("python3", "-S", "-m", "py_compile", "scripts/train.py")
    assert (done.returncode, done.stderr) == (0, "")


class TestDownload:
    LINE = "python3 scripts/download_hf_model.py --repo-id Qwen/Qwen3-4B-Instruct-2507"

    def test_it_goes_where_the_runbook_says(
        self,
        typed: Callable[[list[str]], None],
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        asked = []

        def download(repo_id: str, *, revision: str | None, local_dir: Path) -> str:
            asked.append((repo_id, revision, str(local_dir)))
            return str(local_dir)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        typed(shlex.split(self.LINE))
        assert asked == [("Qwen/Qwen3-4B-Instruct-2507", None, "models/Qwen__Qwen3-4B-Instruct-2507")]
        folder = tmp_path / "models" / "Qwen__Qwen3-4B-Instruct-2507"
        assert f'export TINKER_DEBATE_BASE_MODEL="{folder}"' in capfd.readouterr().out

    def test_without_a_network_one_sentence_says_so(
        self, typed: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def download(*args: object, **kwargs: object) -> str:
            raise OfflineModeIsEnabled("offline mode is enabled.\nMore.")

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(SystemExit):
            typed(shlex.split(self.LINE))
        assert capfd.readouterr().err == (
            "error: Qwen/Qwen3-4B-Instruct-2507 cannot be downloaded (offline mode is enabled.); check the name and the "
            "network, or copy the folder from elsewhere\n"
        )

    def test_a_name_that_is_none(self, typed: Callable[[list[str]], None], capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            typed(["python3", "scripts/download_hf_model.py", "--repo-id", "Qwen//x"])
        assert "'Qwen//x' is no name of the hub: give ORGANISATION/NAME" in capfd.readouterr().err


class TestSetup:
    SCRIPT = "scripts/gh200_setup_local_tinker.sh"

    def test_it_is_a_program_without_mistakes_of_syntax(self) -> None:
        assert (ROOT / self.SCRIPT).stat().st_mode & stat.S_IXUSR
        done = shell("bash", "-n", self.SCRIPT)
        assert (done.returncode, done.stderr) == (0, "")

    def fake_torch(self, tmp_path: Path, cuda: str) -> str:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("from . import version\n__version__ = '2.11.0'\n")
        (tmp_path / "torch" / "version.py").write_text(f"cuda = {cuda}\n")
        return str(tmp_path)

    def test_a_torch_without_cuda_is_refused_before_anything_is_made(self, tmp_path: Path) -> None:
        path = self.fake_torch(tmp_path, "None")
        done = shell("bash", self.SCRIPT, str(tmp_path / "env"), PYTHONPATH=path)
        assert done.returncode == 1 and re.fullmatch(
            r"error: torch 2\.11\.0 of \S+ has no CUDA; use an image .*\n", done.stderr
        )
        assert not (tmp_path / "env").exists()

    @pytest.mark.slow  # an environment is made
    def test_with_cuda_it_makes_an_environment_that_keeps_that_torch(self, tmp_path: Path) -> None:
        """pip itself is kept from working: what it is asked for is the answer."""
        path = self.fake_torch(tmp_path, "'13.0'")
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\nif sys.argv[1:2] == ['install'] or '-m' in sys.orig_argv and 'pip' in sys.orig_argv:\n"
            "    words = sys.orig_argv[sys.orig_argv.index('pip') + 1:]\n"
            "    if words[0] == 'install' and '-e' in words:\n"
            "        print('asked:', open(words[words.index('--constraint') + 1]).read().strip(), words[-1])\n"
            "        sys.stdout.flush(), os._exit(7)\n"
        )
        done = shell("bash", self.SCRIPT, str(tmp_path / "env"), PYTHONPATH=path)
        assert f"asked: torch==2.11.0 {ROOT}" in done.stdout and done.returncode == 7, done.stderr
        assert "include-system-site-packages = true" in (tmp_path / "env" / "pyvenv.cfg").read_text()


def test_the_extras_of_the_guides_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"dev", "vector-search", "verifiers", "wandb"} <= extras.keys()
    assert extras["vector-search"] == ["tinker-cookbook-local[search]"]
