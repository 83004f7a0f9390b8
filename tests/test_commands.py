"""Every command there is, found by looking: none ignores a variable of ours that it does not know, nor tests another model."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import chz
import pytest

from tests.child import ROOT, run_forked

FOLDERS = ("recipes", "tools", "benchmarks", "tinker_local_backend", "tinker_cookbook", "scripts", "examples")
NOT_COMMANDS = {
    "tools.oldest": "runs before anything is installed, and reads no variable",
    "tools.torch_index": "runs before anything is installed, and refuses its own variable",
    "tinker_local_backend.server.engine_process": "a child of the server, which has checked",
    "tinker_local_backend.samplers.vllm_worker": "a child of the engine, which has checked",
    "benchmarks.memory_child": "a child of benchmarks.memory",
    "benchmarks.peers.vllm_child": "a child of a benchmark, in an environment without this project",
}
FOREIGN = {"tinker_local_backend.run"}
"""What runs the programs of others, which may have variables of their own."""


def commands() -> list[str]:
    found = []
    folders = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    for path in (*ROOT.glob("*.py"), *folders):
        if re.search(r'^if __name__ == "__main__":', path.read_text(), re.MULTILINE):
            words = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(words[:-1] if words[-1] == "__main__" else words))
    return sorted(set(found) - NOT_COMMANDS.keys())


COMMANDS = commands()


def keys_of(command: str) -> list[str]:
    """The keys of a command's own config, of the class that it parses."""
    file = module_file(command)
    parsed = re.search(r"(?:run_recipe|parse)\((\w*Config)\b", file.read_text().partition('__name__ == "__main__"')[2])
    module = importlib.import_module(f"{command}.__main__" if file.name == "__main__.py" else command)
    config = (
        getattr(module, parsed[1]) if parsed else get_type_hints(getattr(module, "main", None) or keys_of).get("config")
    )
    return list(chz.chz_fields(config)) if config is not None and chz.is_chz(config) else []


def module_file(command: str) -> Path:
    path = ROOT / command.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


NAMED = {
    "recipes.models": ("model_name=/no/such/model",),
    "recipes.export": ("model_path=tinker://run/sampler_weights/a", "base_model=/no/such/model", "output=merged"),
    "scripts.check_local_sampling_logprobs": ("--model", "/no/such/model"),
    "scripts.train": ("--mode", "single_turn", "--model", "/no/such/model"),
    "tinker_cookbook.chat_app.tinker_chat_cli": ("base_model=/no/such/model",),
    "tinker_cookbook.supervised.viz_sft_dataset": ("model_name=/no/such/model",),
    "recipes.replay": ("run=run", "model_name=/no/such/model"),
    "tinker_local_backend.import_adapter": ("adapter=adapter", "base_model=/no/such/model"),
    "tinker_local_backend.plan": ("model=/no/such/model",),
    "tinker_local_backend.merge": ("checkpoint=adapter", "base_model=/no/such/model", "output=merged"),
    "tools.make_tiny_debate.figures": ("model=/no/such/model",),
    "tools.make_tiny_model.figures": ("model=/no/such/model",),
}
"""Commands whose model is that of what they are given, or none, unless it is named."""
MORE = {
    "recipes.verifiers_rl": ("taskset=reverse-text",),
    "scripts.download_hf_model": ("--repo-id", "organisation/name"),
    "scripts.train": ("--mode", "single_turn"),
    "tinker_local_backend.server": ("port=0",),
}
"""What else some commands must be given."""


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        ("recipes.rlbasic", "there is no recipe 'rlbasic'; did you mean rl_basic?"),
        (
            "recipes.distilation.on_policy",
            "there is no recipe 'distilation.on_policy'; did you mean distillation.on_policy?",
        ),
        ("recipes.zzzzzz", "there is no recipe 'zzzzzz'; python -m recipes lists them"),
    ],
)
def test_a_misspelt_recipe_is_answered_with_the_nearest(module: str, answer: str) -> None:
    """By the package itself: the interpreter looks for the module before any code of ours could be its `__main__`."""
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {answer}\n")


def test_what_is_no_command_is_there() -> None:
    assert NOT_COMMANDS.keys() <= {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    some = {"recipes", "recipes.debate_judge.rl", "benchmarks.gpu", "tinker_local_backend.server", "run_experiment"}
    some |= {"scripts.train", "examples.dpo", "tinker_cookbook.utils.trace", "tools.wheels"}
    assert len(COMMANDS) > 75 and some <= set(COMMANDS)


def refusal(command: str, tmp_path: Path, *keys: str, **variables: str) -> str:
    """What a command says that must end with exit code 2 and one line."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    own |= {"TINKER_LOCAL_HOME": str(tmp_path / "home"), "TINKER_DEBATE_LOG_ROOT": str(tmp_path / "runs")}
    done = run_forked(["-m", command, *keys], env={**own, "HF_HUB_OFFLINE": "1", **variables})
    lines = [line for line in done.stderr.strip().splitlines() if "RuntimeWarning" not in line]  # of runpy, preloaded
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "home").exists()
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_variable_ends_it(command: str, tmp_path: Path) -> None:
    words = ("-m", "this") if command in FOREIGN else MORE.get(command, ())
    said = refusal(command, tmp_path, *words, TINKER_LOCAL_DEVCIE="cpu")
    assert "TINKER_LOCAL_DEVCIE is set, but there is no such variable; did you mean TINKER_LOCAL_DEVICE?" in said


def test_so_does_one_of_the_whole_family_but_for_the_programs_of_others(tmp_path: Path) -> None:
    assert "did you mean TINKER_BACKEND?" in refusal("recipes.report", tmp_path, TINKER_BACKNED="local")
    for command in ("tools.llms_txt", "recipes"):
        assert "there is no such variable; unset it. Known: " in refusal(command, tmp_path, TINKER_ZZZ="1")
    assert "must be an integer" in refusal("recipes.plot", tmp_path, TINKER_LOCAL_SEED="x")
    own = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    done = run_forked(["-m", "tinker_local_backend.run", "-m", "this"], env={**own, "TINKER_OF_MINE": "1"})
    assert done.returncode == 0 and "Beautiful is better than ugly" in done.stdout, done.stderr


NO_MODEL = "/no/such/model"
SLOW = "tinker_cookbook.eval.run_inspect_evals"
"""inspect-ai, where it is there, takes seconds to load, and `recipes.eval_inspect` is the same"""
OF_A_SERVER = {"tinker_local_backend.conformance"}
"""Commands that name a model of a server elsewhere, which alone knows whether it has one."""
BY_VARIABLE = [
    *(name for name in COMMANDS if "model_name" in keys_of(name) and name not in {*NAMED, SLOW}),
    "tinker_local_backend.check_logprobs",
    "tinker_local_backend.server",
    "recipes.debate_tournament",
    "recipes.demo",
    "benchmarks.shadow",
]


@pytest.mark.parametrize("command", BY_VARIABLE)
def test_a_model_that_is_not_there_ends_it(command: str, tmp_path: Path) -> None:
    if command == "recipes.eval_inspect":
        pytest.importorskip("inspect_ai")
    said = refusal(command, tmp_path, *MORE.get(command, ()), TINKER_DEBATE_BASE_MODEL=NO_MODEL)
    assert NO_MODEL in said, said


@pytest.mark.parametrize(("command", "keys"), NAMED.items())
def test_so_does_one_that_is_named(command: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    assert NO_MODEL in refusal(command, tmp_path, *keys)


def test_no_command_that_takes_a_model_is_forgotten() -> None:
    takes = {name for name in COMMANDS if {"model_name", "model", "models", "base_model"} & set(keys_of(name))}
    assert takes <= {*BY_VARIABLE, *NAMED, *OF_A_SERVER, SLOW}
