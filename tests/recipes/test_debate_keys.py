"""Every protocol and judge is named on the command line of the debate recipe, checked before a model loads, and explained."""

import math
from pathlib import Path

import pytest
from chz.blueprint import InvalidBlueprintArg

from recipes import debate_rs_grpo
from tests.debate.test_grid import Replies
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.dataset import Debates
from tinker_cookbook.debate.judges import JUDGES
from tinker_cookbook.debate.modes import MODES
from tinker_cookbook.debate.protocols import PROTOCOLS
from tinker_cookbook.endpoints import EndpointConfig
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.files import read_jsonl

ENDPOINT = ("judge.endpoint.base_url=http://nowhere", "judge.endpoint.model=m", "judge.endpoint.api_key_variable=None")


def built(*arguments: str) -> Debates:
    cli = cli_utils.parse(debate_rs_grpo.CLIConfig, list(arguments))
    builder = debate_rs_grpo.build_config(cli).dataset_builder
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, Debates)
    return builder.env


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_by_its_short_name(name: str) -> None:
    assert built(f"protocol={name}").protocol.name == name


def test_keys_of_a_protocol_without_its_name() -> None:
    protocol = built(
        "protocol.seats=4", "protocol.order=sequential", "protocol.rounds=1", "protocol.quotes=true"
    ).protocol
    assert (protocol.name, protocol.seats, protocol.order, protocol.rounds) == ("debate", 4, "sequential", 1)
    assert protocol.quotes


@pytest.mark.parametrize("name", JUDGES.names())
def test_a_judge_by_its_short_name(name: str) -> None:
    builder = built(f"judge={name}", "judge.max_retries=3", *(ENDPOINT if name == "endpoint" else ()))
    assert (builder.judge.name, builder.judge.max_retries, builder.held_out_judge) == (name, 3, None)


def test_a_held_out_judge_with_its_own_weights_and_what_else_is_measured() -> None:
    builder = built(
        "held_out_judge=lm", "held_out_judge.weights.base_model=tiny_debate", "judge=lm", "measure=no_debate,with_key"
    )
    assert (
        builder.held_out_judge is not None
        and builder.judge.weights.base_model != builder.held_out_judge.weights.base_model
    )
    assert str(builder.held_out_judge.weights.base_model).endswith("tiny_debate") and builder.measure == (
        "no_debate",
        "with_key",
    )


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("protocol=duel",), "proposer_critic"),
        (
            ("protocol=direct", "protocol.name=key"),
            "protocol=direct and protocol.name=key are the same key; give one of the two",
        ),
        (("protocol.seats=3",), "try num_rollouts=72"),
        (("measure=truth",), "measure=truth is unknown; use no_debate, with_key"),
        (("judge=confidence", "protocol.answers=assigned", "debate_train=judge"), "no debater states a confidence"),
        (("prompts.closing=no",), "prompts.closing must contain {opponent} exactly once"),
        (("judge=mock", "judge.soft=true"), "use judge.name=lm, live, endpoint"),
    ],
)
def test_what_does_not_fit_is_said_before_a_model_loads(arguments: tuple[str, ...], wrong: str) -> None:
    with pytest.raises((ConfigurationError, TypeError, InvalidBlueprintArg)) as error:
        built(*arguments)
    assert wrong in str(error.value)


def test_help_explains_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_recipe(debate_rs_grpo.CLIConfig, debate_rs_grpo.main, argv=["--help=all"])
    told = "".join(capsys.readouterr().out.split())
    for words in (
        *PROTOCOLS,
        "protocol.order",
        "protocol.answers",
        "judge.both_orders",
        "judge.votes",
        "judge.soft",
        "measure",
    ):
        assert words in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("protocol.seats=4", "protocol.rounds=1", "protocol.order=sequential", "judge=lm", "judge.votes=2"),
        ("protocol=proposer_critic", "judge=lm", "judge.both_orders=true", "measure=no_debate,with_key"),
        ("protocol=consultancy", "protocol.answers=assigned", "debate_train=judge", "judge=lm", "judge.soft=true"),
        ("protocol=consultancy", "protocol.rounds=1", "judge=live"),
        ("debate_train=soft_judge", "judge=live", "judge.soft=true"),
        ("protocol=direct", "judge=confidence", "held_out_judge=lm"),
        ("protocol=key", "judge=lm", "debate_train=rejection"),
        ("task=summary", "protocol.quotes=true", "judge=scripted:longer"),
    ],
)
def test_a_run(arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_to_its_end(arguments, tmp_path / "run", capsys)


def run_to_its_end(arguments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny judge may find nobody, and then the run trains nothing."""
    small = ("num_rollouts=16", "num_groups=2", "max_steps=1", "eval_every=0", "max_tokens=24", "lora_rank=4")
    argv = [*arguments, *small, "on_zero_advantages=skip", f"log_path={folder}"]
    run_recipe(debate_rs_grpo.CLIConfig, debate_rs_grpo.main, argv=argv)
    (row,) = read_jsonl(folder / "metrics.jsonl")
    assert 0 <= row["env/all/debate/won"] <= 1 and "env/all/debate/invalid" in row


def makes_sense(*arguments: str) -> bool:
    try:
        built(*arguments)
    except ConfigurationError:
        return False
    return True


@pytest.mark.slow
def test_each_protocol_judge_and_mode_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that there are, in as few runs as it takes; a judge that an endpoint speaks for says its verdicts in turn."""
    monkeypatch.setattr(EndpointConfig, "open", lambda *_: Replies())
    axes = [
        [f"protocol={name}" for name in PROTOCOLS],
        [f"judge={name}" for name in JUDGES.names()],
        [f"debate_train={name}" for name in MODES.names()],
    ]
    left = {key for axis in axes for key in axis}
    for i in range(math.prod(map(len, axes))):
        keys = tuple(axis[i % len(axis)] for axis in axes)
        if "debate_train=soft_judge" in keys:
            keys = (*keys, "judge.votes=3")
        arguments = (*keys, *(ENDPOINT if "judge=endpoint" in keys else ()))
        if left & set(keys) and makes_sense(*arguments):
            left -= set(keys)
            run_to_its_end(arguments, tmp_path / f"run_{i}", capsys)
    assert not left
