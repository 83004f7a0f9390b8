"""Experiments as the Minds RL harness runs them: its files, its environments, its commands and its Trainer."""

import asyncio
import itertools
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import run_experiment as at_the_root
from recipes import run_experiment
from recipes.common import for_model
from recipes.run_experiment import CLIConfig, Trainer
from tests.debate.arena import make_renderer, reply_ids
from tests.fakes import FakeServiceClient, SampleCall
from tests.pages import ROOT
from tests.rl import loop
from tinker_cookbook import cli_utils, env
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.verifiers import v0_1
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.utils.metric_names import FINAL_KEY

RENDERER = make_renderer("qwen3_instruct")

TASK = """
from types import SimpleNamespace

class Task:
    def __init__(self, difficulty):
        self.difficulty = difficulty
    def initial_observation(self) -> str:
        return f"Say something {self.difficulty}."
    def step(self, action):
        return {"reward": float(len(action) % 3)}

def load_environment(difficulty="easy"):
    return Task(difficulty)
"""
FILE = """
[env]
id = "./environments/my_new_task"

[env.args]
difficulty = "hard"

[trainer]
loss_fn = "importance_sampling"

[trainer.args]
rollouts_per_example = 4
max_new_tokens = 16
max_steps = 3
groups_per_batch = 1
lora_rank = 2

[model]
base_model = "tiny_chat"

[tinker]
api_key_env = "MY_TINKER_KEY"
"""
SINGLE_TURN = """
import verifiers as vf

def right(completion, answer, parser, **kwargs) -> float:
    said = completion[-1]["content"]
    return float(parser.parse_answer(completion) == answer) + 0.01 * (len(said) % 7)

async def asked(prompt, completion: str, task, state, info):
    return float([message["role"] for message in prompt] == ["system", "user", "assistant", "user"]) + len(completion) / 100

def load_environment(highest: int = 3, **kwargs) -> vf.Environment:
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(highest)]
    rubric = vf.Rubric(funcs=[right], weights=[1.0], parser=parser)
    rubric.add_reward_func(asked, weight=0.5)
    few_shot = [{"role": "user", "content": "What is 7 + 1?"}, {"role": "assistant", "content": "<answer>8</answer>"}]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:1], rubric=rubric, few_shot=few_shot,
                            system_prompt="Answer between <answer> tags.", parser=parser, **kwargs)
"""


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TINKER_API_KEY", "before")
    monkeypatch.setenv("MY_TINKER_KEY", "mine")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


@pytest.fixture
def seed_file() -> str:
    write("environments/my_new_task/__init__.py", TASK)
    return write("configs/hard.toml", FILE)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    counted = itertools.count(1)

    def words(call: SampleCall) -> list[int]:
        """No two replies in a row are of one length."""
        return reply_ids(RENDERER, "moss" * (next(counted) % 5 + 1))

    made = FakeServiceClient(words)
    monkeypatch.setattr("tinker_cookbook.backends.create_service_client", lambda *_, **__: made)
    return made


def asked_of(service: FakeServiceClient) -> list[str]:
    return [str(RENDERER.tokenizer.decode(call.prompt)) for call in service.sampled]


def test_a_file_as_the_harness_writes_it(seed_file: str) -> None:
    cli = cli_utils.parse(CLIConfig, [seed_file])
    assert (cli.group_size, cli.max_tokens, cli.max_steps, cli.loss_fn) == (4, 16, 3, "importance_sampling")
    assert cli.api_key_env == "MY_TINKER_KEY" and cli.envs[0].args == {"difficulty": "hard"}
    assert cli_utils.parse(CLIConfig, [seed_file, "trainer.args.rollouts_per_example=6"]).group_size == 6


TABLE_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")


def test_the_table_of_commands_says_what_holds(seed_file: str, service: FakeServiceClient) -> None:
    """What docs/runbooks.md has under "Commands of the experiment harness": its programs, scripts and file lines are tried."""
    table = (ROOT / "docs" / "runbooks.md").read_text().partition("## Commands of the experiment harness")[2]
    rows = TABLE_ROW.findall(table)
    assert len(rows) >= 14
    spans = [span for row in rows for cell in row for span in SPAN.findall(cell)]
    files = [
        span.split()[-1] for span in spans if re.match(r"python (-m recipes.run_experiment|run_experiment.py) ", span)
    ]
    assert len(files) == 2
    for path in files:
        name = cli_utils.parse(CLIConfig, [str(ROOT / path)])
        assert f"`{run_experiment.folder_of(name)}/metrics.json`" in table
    (script,) = (span for span in spans if span.startswith("Trainer.from_config("))
    script = script.replace("configs/train_ghost.toml", seed_file).replace("max_steps=4", "max_steps=1")
    assert eval(script, {"Trainer": at_the_root.Trainer}) == Path("ghost")
    written = [span for span in spans if span.startswith(("[trainer", "groups_per_batch", "temperature"))]
    assert len(written) == 4
    for line in written:
        key, _, value = line.rpartition("] ")[2].partition(" = ")
        assert not value or cli_utils.parse(CLIConfig, [seed_file, f"trainer.{key}={value}"])
    named = [span.partition("/")[2] for span in spans if span.startswith("environments/")]
    named += [span.rpartition("/")[2] for span in spans if span.startswith("pip install -e environments/")]
    assert sorted(named) == ["ghost_trace", "gradient_prophet", "self_prediction"]
    assert set(named) <= set(env.known_envs())


def test_trainer_runs_a_file_from_python(seed_file: str, service: FakeServiceClient) -> None:
    trainer = Trainer.from_config(Path(seed_file))
    assert trainer.config.max_steps == 3 and trainer.config.model_name == "tiny_chat"
    folder = trainer.train(max_steps=2, output_dir="mine")
    assert folder == Path("mine") and trainer.config.max_steps == 3
    rows = json.loads((folder / "metrics.json").read_text())
    assert [row["step"] for row in rows if row["stage"] == "train"] == [0, 1] and "reward" in rows[0]
    assert [row["step"] for row in read_metrics(folder)][:2] == [0, 1]
    prompts = asked_of(service)
    assert len(prompts) == 2 * 4 and all("Say something hard." in prompt for prompt in prompts)


def test_trainer_checks_everything_before_anything_loads(seed_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TINKER_KEY")
    with pytest.raises(ConfigurationError, match="api_key_env=MY_TINKER_KEY: this variable is not set"):
        Trainer.from_config(seed_file, "tinker.backend=tinker")
    with pytest.raises(ConfigurationError, match=r"env.args.hardness: .*unexpected keyword argument"):
        Trainer.from_config(seed_file, "env.args.hardness=3")
    with pytest.raises(ConfigurationError, match="No such file"):
        Trainer.from_config("nothing.toml")


def test_trainer_takes_the_key_that_the_file_names(seed_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Trainer.from_config(seed_file)
    assert run_experiment.os.environ["TINKER_API_KEY"] == "mine"


def test_within_an_event_loop_trainer_is_awaited(seed_file: str, service: FakeServiceClient) -> None:
    async def script() -> Path:
        trainer = Trainer.from_config(seed_file, "trainer.seed=3")
        with pytest.raises(ConfigurationError, match="use `await trainer"):
            trainer.train()
        return await trainer.train_async(max_steps=1)

    assert asyncio.run(script()) == Path("outputs/hard") and Path("outputs/hard/metrics.json").exists()


def test_each_experiment_has_a_folder_of_its_own(
    seed_file: str, service: FakeServiceClient, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write("configs/easy.toml", FILE.replace('"hard"', '"easy"'))
    for path in (seed_file, other):
        run_recipe(CLIConfig, run_experiment.main, [path, "max_steps=1"], prog="run")
    assert sorted(path.name for path in Path("outputs").iterdir()) == ["easy", "hard"]
    with pytest.raises(SystemExit):
        run_recipe(CLIConfig, run_experiment.main, [other, "max_steps=1"], prog="run")
    assert "log_path='outputs/easy': exists already" in capsys.readouterr().err
    run_recipe(CLIConfig, run_experiment.main, [other, "max_steps=1", "name=again"], prog="run")
    run_recipe(CLIConfig, run_experiment.main, [other, "max_steps=2", "behavior_if_log_dir_exists=resume"], prog="run")
    assert [row["step"] for row in read_metrics("outputs/easy")][:2] == [0, 1]
    assert Path("outputs/easy_again/metrics.json").exists()


def test_the_program_at_the_root_is_the_recipe(
    seed_file: str, service: FakeServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at_the_root.Trainer is Trainer
    assert len((ROOT / "run_experiment.py").read_text().splitlines()) <= 12
    monkeypatch.setattr(sys, "argv", ["run_experiment.py", seed_file, "trainer.max_steps=1"])
    runpy.run_path(str(ROOT / "run_experiment.py"), run_name="__main__")
    assert Path("outputs/hard/metrics.json").exists()


def mixture(weight: str = "0", **evaluated: str) -> str:
    write("environments/my_new_task/__init__.py", TASK)
    lines = "\n".join(f"{key} = {value}" for key, value in evaluated.items())
    tail = FILE[FILE.index("[trainer]") :]
    text = f"""
        [[envs]]
        name = "trained"
        id = "./environments/my_new_task"
        [[envs]]
        name = "watched"
        weight = {weight}
        {lines}
    """
    return write("mixture.toml", dedent(text) + tail)


ROWS_ONLY = """
from types import SimpleNamespace

def odd(completion: str):
    return float(len(completion) % 2)

def load_environment():
    return SimpleNamespace(dataset=[{"question": f"Question {n}?"} for n in range(5)], rubric={"funcs": [odd]})
"""


@pytest.mark.parametrize("watched", ["./environments/my_new_task", "rows_only.py", "kuhn_poker"])
def test_an_environment_of_weight_0_is_evaluated_and_never_trained(watched: str, service: FakeServiceClient) -> None:
    write("rows_only.py", ROWS_ONLY)
    args = {"args": '{ difficulty = "odd" }'} if watched.startswith(".") else {}
    path = mixture(id=f'"{watched}"', **args)
    run_recipe(CLIConfig, run_experiment.main, [path, "max_steps=2", "num_test=3", "eval_every=1"], prog="run")
    *rows, last = read_metrics("outputs/mixture")
    assert len(rows) == 2 and all(row["test/env/all/total_episodes"] >= 3 for row in (*rows, last))
    assert all(row["env/all/total_episodes"] == 4 for row in rows)
    asked = [prompt for prompt in asked_of(service) if "Say something easy." in prompt]
    assert len(asked) == 2 * 4
    seen = [prompt for prompt in asked_of(service) if "Say something easy." not in prompt]
    if watched == "rows_only.py":  # each row once, as far as num_test goes, in order, at each of three evaluations
        assert [re.findall(r"Question \d", prompt)[0] for prompt in seen] == [f"Question {n}" for n in range(3)] * 3
    if args:
        assert len(seen) == 3 * 3 and all("Say something odd." in prompt for prompt in seen)


@pytest.mark.parametrize(
    ("weight", "message"), [("-1", "the weight of watched is -1"), ("inf", "the weight of watched is inf")]
)
def test_a_weight_that_is_none_names_its_environment(weight: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cli_utils.parse(CLIConfig, [mixture(weight, id='"kuhn_poker"')])


def test_without_any_weight_nothing_would_train() -> None:
    path = mixture(id='"kuhn_poker"')
    cli = for_model(cli_utils.parse(CLIConfig, [path, "envs.trained.weight=0"]))
    with pytest.raises(ConfigurationError, match=r"envs.trained.weight=0, envs.watched.weight=0: nothing would train"):
        run_experiment.make_dataset_builder(cli)


def verifiers_file(text: str = SINGLE_TURN, args: str = "highest = 2") -> str:
    write("environments/vf_sums/vf_sums.py", text)
    own = FILE.replace("my_new_task", "vf_sums").replace('difficulty = "hard"', args)
    return write("vf_sums.toml", own.replace("max_steps = 3", "max_steps = 2"))


def test_an_environment_of_verifiers_0_1_plays_without_the_package(service: FakeServiceClient) -> None:
    assert "verifiers" not in sys.modules
    folder = Trainer.from_config(verifiers_file()).train(output_dir="vf")
    assert "verifiers" not in sys.modules
    row = read_metrics(folder)[0]
    assert 1.0 < row["env/all/reward/asked"] < 1.3 and row["env/all/reward/right"] > 0
    prompt = asked_of(service)[0]
    assert re.search(r"Answer between.*7 \+ 1\?.*<answer>8</answer>.*What is \d \+ 1\?", prompt, re.DOTALL)


@pytest.mark.slow
def test_it_trains_two_steps_on_the_shipped_model() -> None:
    rows = read_metrics(Trainer.from_config(verifiers_file()).train(output_dir="vf"))
    assert [row["optim/grad_norm"] > 0 for row in rows if FINAL_KEY not in row] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import verifiers as vf\nvf.ToolEnv", r"AttributeError: verifiers.ToolEnv: the package .* not installed"),
        ("from verifiers import MultiTurnEnv", r"cannot import name 'MultiTurnEnv'.*: the package verifiers is not"),
        ("import verifiers.v1 as vf", r"verifiers.v1.*: the package verifiers is not .* SingleTurnEnv, Rubric, Parser"),
        ("import no_such_module", r"importing it failed: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_the_stand_in_lacks_says_what_to_install(text: str, message: str) -> None:
    write("lacking.py", f"{text}\ndef load_environment(): ...\n")
    with pytest.raises(ConfigurationError, match=message):
        env.load("lacking.py")
    assert "verifiers" not in sys.modules


def test_a_package_that_is_installed_is_never_shadowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write("installed/verifiers.py", SINGLE_TURN.split("def right")[0].replace("import verifiers as vf", "REAL = True"))
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    write("uses.py", "import verifiers\nassert verifiers.REAL\n" + TASK)
    assert env.load("uses.py")
    assert sys.modules["verifiers"].__file__ == str(tmp_path / "installed" / "verifiers.py")


def test_an_environment_may_load_another_by_its_name() -> None:
    write("inner.py", SINGLE_TURN)
    write(
        "outer.py",
        "import verifiers as vf\ndef load_environment():\n    return vf.load_environment('inner.py', highest=2)\n",
    )
    made: Any = env.load("outer.py")
    assert isinstance(made.loaded, v0_1.SingleTurnEnv) and len(made.questions.rows) == 2
    assert made.loaded.get_eval_dataset() == made.loaded.get_dataset()[:1]
    assert made.loaded.get_reward_weights() == [1.0, 0.5]


ROW = {"question": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"SingleTurnEnv\(dataset=None\): there is nothing to train on"),
        ({"dataset": [ROW], "message_type": "completion"}, "message_type='completion': only chat"),
        (
            {"dataset": [ROW], "sampling_args": {"temperature": 1}},
            r"sampling_args=\.\.\.\): sampling is that of the run",
        ),
        (
            {"dataset": [{"prompt": "a"}], "few_shot": [{"role": "user", "content": "b"}]},
            "rows with `prompt` are whole",
        ),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        v0_1.SingleTurnEnv(**args)


def test_parsers_read_as_those_of_0_1() -> None:
    parser = v0_1.XMLParser(["think", ("code", "answer")])
    text = "<think> a </think><answer>1</answer><answer> 2 </answer>"
    read = parser.parse(text)
    assert (read.think, read.code, read.answer) == ("a", None, "1") and parser.parse_answer(text) == "2"
    said = [{"role": "assistant", "content": text}, {"role": "user", "content": "<answer>9</answer>"}]
    assert parser.parse_answer(said) == "1" and parser.parse_answer([]) is None
    assert (
        parser.get_fields() == ["think", "code"]
        and parser.format(think=1, answer=2) == "<think>\n1\n</think>\n<code>\n2\n</code>"
    )
    assert parser.get_format_str().splitlines()[3:] == ["<[ code | answer ]>", "...", "</[ code | answer ]>"]
    score = parser.get_format_reward_func()
    replies = {text: 1.0, "<think>a</think>": 0.6, "a": 0.2, "<think>": 0.4, " <think>b</think> c": 0.6}
    for reply, expected in replies.items():
        assert score([{"role": "assistant", "content": reply}]) == pytest.approx(expected), reply
    assert score([]) == 0.0
    thinks = v0_1.ThinkParser(extract_fn=str.upper)
    assert (thinks.parse("<think>a</think> b"), thinks.parse("b")) == ("B", "")
    graded = [thinks.format_score(reply) for reply in ("<think>a</think>b", "<think>a</think>", "a</think>b")]
    assert graded == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="the name a comes twice"):
        v0_1.XMLParser(["a", "a"])
    with pytest.raises(ValueError, match="there is no value for the field code; give one of code, answer"):
        parser.format(think=1)


async def gives_an_object(self, action):
    return type("StepResult", (), {"reward": float(len(action))})()


@pytest.mark.parametrize(
    "step",
    [
        lambda self, action: {"reward": float(len(action))},
        lambda self, action: len(action),
        lambda self, action_text: type("StepResult", (), {"reward": len(action_text)})(),
        gives_an_object,
    ],
)
def test_the_minimum_interface_of_an_episode(
    step: Callable[..., Any], service: FakeServiceClient, tmp_path: Path
) -> None:
    kind = type("Game", (), {"initial_observation": lambda self: "Go.", "step": step})
    builder = env.get_env(kind).dataset_builder("tiny_chat", groups_per_batch=1, group_size=4, num_batches=1)
    loop.run(loop.make_config(tmp_path, builder))
    (row, *_) = read_metrics(tmp_path)
    assert 4 <= row["env/all/reward/total"] <= 20
