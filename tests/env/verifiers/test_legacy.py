"""Environments of verifiers 0.3.1: recorded episodes replay without the package; with it, they are what they were."""

import asyncio
import json
import logging
import signal
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.env.verifiers.record_legacy import ENVIRONMENTS, RECORDED, record
from tests.env.verifiers.scripts import TINY, make_renderer
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.env.verifiers import config, legacy
from tinker_cookbook.env.verifiers.legacy import LegacyGroupBuilder, failed_rewards, read_max_tokens
from tinker_cookbook.env.verifiers.player import Player
from tinker_cookbook.exceptions import ConfigurationError, EpisodeFailedError
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.files import read_jsonl
from tinker_cookbook.utils.lazy import tinker

EPISODES: dict[str, Any] = json.loads(RECORDED.read_text())["episodes"]


def installed() -> str | None:
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return None


with_package = pytest.mark.skipif(installed() != "0.3.1", reason="`make test-verifiers-legacy` has verifiers 0.3.1")


class Replay:
    """A recorded environment: asks what was asked, and gives the state that came of it."""

    def __init__(self, recorded: Any):
        self.rollouts, self.rubric = iter(recorded["rollouts"]), self

    async def rollout(self, row: Any, player: Player, model: str, sampling_args: Any) -> Any:
        recorded = next(self.rollouts)
        for asked in recorded["asked"]:
            tools = [legacy.read_tool(tool) for tool in asked["tools"] or []]
            await player.call(legacy.read_messages(asked["prompt"]), read_max_tokens(asked["sampling_args"]), tools)
        return recorded["state"]

    async def score_group(self, states: Any) -> None: ...

    async def cleanup(self, state: Any) -> None: ...


class Recorded(TokenCompleter):
    """Answers each prompt with the ids that answered it then. Any other prompt is a KeyError."""

    def __init__(self, recorded: Any):
        self.replies: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for rollout in recorded["rollouts"]:
            for asked in rollout["asked"]:
                self.replies[tuple(asked["prompt_ids"])].append(asked["completion_ids"])
        self.replies = dict(self.replies)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        tokens = self.replies[tuple(model_input.to_ints())].pop(0)
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens))


def replay(name: str, monkeypatch: pytest.MonkeyPatch) -> TrajectoryGroup:
    recorded = EPISODES[name]
    env = Replay(recorded)
    monkeypatch.setattr(legacy, "load_legacy", lambda said, args: env)
    monkeypatch.setattr(legacy, "make_client", lambda player: player)
    builder = LegacyGroupBuilder("recorded", {}, recorded["row"], len(recorded["rollouts"]), make_renderer())
    return asyncio.run(do_group_rollout(builder, Recorded(recorded)))


@pytest.mark.parametrize(("name", "datums"), [("sums", 1), ("group", 1), ("tools", 1), ("haggle", 2)])
def test_recorded_episodes_give_the_same_data_and_rewards(
    name: str, datums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, recorded = replay(name, monkeypatch), EPISODES[name]
    assert group.get_total_rewards() == recorded["rewards"] and group.metrics_G == recorded["metrics"]
    for trajectory, rollout in zip(group.trajectories_G, recorded["rollouts"], strict=True):
        asked = [(one["prompt_ids"], one["completion_ids"]) for one in rollout["asked"]]
        assert [(turn.ob.to_ints(), list(turn.ac.tokens)) for turn in trajectory.transitions] == asked
        branches = [
            [*prompt, *reply]
            for i, (prompt, reply) in enumerate(asked)
            if i + 1 == len(asked) or asked[i + 1][0][: len(prompt) + len(reply)] != [*prompt, *reply]
        ]
        data = trajectory_to_data(trajectory, 1.0)
        whole = [[*d.model_input.to_ints(), int(d.loss_fn_inputs["target_tokens"].data[-1])] for d in data]
        assert whole == branches and len(branches) == datums
        assert sum(int(d.loss_fn_inputs["mask"].to_numpy().sum()) for d in data) == sum(
            len(reply) for _, reply in asked
        )
        assert trajectory.stop_reason == rollout["state"]["stop_condition"]


def test_calls_of_tools_are_recorded_as_the_package_made_them() -> None:
    first, second = EPISODES["tools"]["rollouts"][0]["asked"][:2]
    assert [tool["name"] for tool in first["tools"]] == ["add"]
    assert second["prompt"][-2]["tool_calls"][0]["name"] == "add" and second["prompt"][-1]["role"] == "tool"


def test_a_rollout_with_an_error_fills_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EpisodeFailedError, match="rollout of example 0: the shop is closed"):
        replay("closed", monkeypatch)


def test_calls_that_a_rollout_did_not_keep_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(json.dumps(EPISODES["haggle"]))
    for rollout in recorded["rollouts"]:
        del rollout["state"]["trajectory"][2]
    monkeypatch.setitem(EPISODES, "haggle", recorded)
    group = replay("haggle", monkeypatch)
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [2, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"temperature": 0.3}, "sampling.temperature=0.3: the run's settings apply"),
        ({"logit_bias": {}}, "logit_bias={}"),
    ],
)
def test_settings_that_are_the_runs_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_max_tokens(args)
    assert read_max_tokens({"n": 1, "extra_body": {}, "max_tokens": 7, "temperature": None}) == 7


def test_errors_of_reward_functions_are_seen_where_they_happen() -> None:
    async def score(name: str) -> list[str]:
        with failed_rewards() as failed:
            await asyncio.sleep(0)
            logging.getLogger("verifiers.legacy.rubrics").error(name)
            await asyncio.sleep(0)
        return failed

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(score("a"), score("b")))

    assert asyncio.run(both()) == [["a"], ["b"]]


@pytest.mark.parametrize("found", ["0.5.0", "0.3.0", "0.1.14"])
def test_other_versions_are_refused_by_name(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("verifiers", (), {"__version__": found})
    monkeypatch.setattr(config.importlib, "import_module", lambda name: module)
    with pytest.raises(ConfigurationError, match=rf"verifiers {found} is installed; 0\.4\.\* is needed .*, or 0\.3\.1"):
        config.installed_form()


@pytest.mark.verifiers
@with_package
def test_the_package_does_what_was_recorded() -> None:
    assert json.loads(json.dumps(record()["episodes"])) == EPISODES


@pytest.mark.verifiers
@with_package
def test_the_recipe_trains_on_an_environment(tmp_path: Path) -> None:
    from recipes.verifiers_rl import CLIConfig, main

    before = signal.getsignal(signal.SIGTERM)
    fields = {
        "taskset": ENVIRONMENTS,
        "taskset_args": {"highest": 2},
        "eval_every": 2,
        "model_name": TINY,
        "max_steps": 2,
    }
    asyncio.run(main(CLIConfig(**fields, log_path=str(tmp_path))))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert {"env/all/reward/right", "env/all/reward/num_turns"} <= rows[1].keys()
    assert any("test/env/all/reward/total" in row for row in rows) and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ConfigurationError, match=r"env='best-of-n': verifiers 0\.3\.1 has no such part"):
        asyncio.run(main(CLIConfig(**fields, env="best-of-n", log_path=str(tmp_path / "other"))))
    with pytest.raises(ConfigurationError, match=r"has no load_environment, which is what verifiers 0\.3\.1 takes"):
        asyncio.run(main(CLIConfig(taskset="json", model_name=TINY, log_path=str(tmp_path / "third"))))


@pytest.mark.verifiers
@with_package
def test_a_reward_function_that_fails_is_no_reward_of_zero() -> None:
    row = legacy.read_rows(legacy.load_legacy(ENVIRONMENTS, {"kind": "broken"}), "broken", 1)[0]
    builder = LegacyGroupBuilder(ENVIRONMENTS, {"kind": "broken"}, row, 1, make_renderer())
    with pytest.raises(ValueError, match="Error calling reward function broken: 'no such field'"):
        asyncio.run(do_group_rollout(builder, Recorded(EPISODES["sums"])))
