"""Plays environments of verifiers 0.3.1 with a script for a policy, and writes down what the package asked and what came of it.

make test-verifiers-legacy  # makes the environment, and compares what is recorded with what the package does
.venv-verifiers-legacy/bin/python -m tests.env.verifiers.record_legacy  # records it anew
"""

import asyncio
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.env.verifiers.scripts import CALL, Script, make_renderer
from tinker_cookbook.env.verifiers import legacy
from tinker_cookbook.env.verifiers.legacy import LegacyGroupBuilder, load_legacy, read_rows
from tinker_cookbook.env.verifiers.player import Player
from tinker_cookbook.exceptions import EpisodeFailedError
from tinker_cookbook.rl.rollouts import do_group_rollout

HERE = Path(__file__).parent
RECORDED = HERE / "recorded_legacy.json"
ENVIRONMENTS = str(HERE / "legacy_environments.py")
EPISODES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sums": ({"kind": "sums"}, ("1", "It is 1.")),
    "group": ({"kind": "group"}, ("1", "It is 1.")),
    "tools": (
        {"kind": "tools"},
        ("I add." + CALL.format("add", '{"a": 0, "b": 1}'), "1", CALL.format("take", "{}"), "2", "3"),
    ),
    "haggle": ({"kind": "haggle"}, ("5", "4", "3", "2", "1", "0")),
    "closed": ({"kind": "haggle", "max_turns": 5}, ("5", "4", "3")),
}
"""By name: the arguments of load_environment, and what the policy says, in order."""


def dump(value: Any) -> Any:
    return json.loads(
        json.dumps(
            value,
            default=lambda found: found.model_dump(exclude_none=True) if hasattr(found, "model_dump") else str(found),
        )
    )


def play(name: str) -> dict[str, Any]:
    """Two rollouts of the first row (one that fails): the requests of each, and its state as the rubric left it."""
    args, replies = EPISODES[name]
    from tinker_cookbook.env.verifiers.legacy_client import PolicyClient

    asked: list[list[Any]] = []

    class Recorder(PolicyClient):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            asked = dump({"prompt": prompt, "tools": tools, "sampling_args": sampling_args})
            response = await super().get_response(prompt, model, sampling_args, tools, **kwargs)
            tokens = response.message.tokens
            self.asked.append(asked | {"prompt_ids": tokens.prompt_ids, "completion_ids": tokens.completion_ids})
            return response

        def __init__(self, player: Player):
            super().__init__(player)
            self.asked: list[Any] = []
            asked.append(self.asked)

    row = read_rows(load_legacy(ENVIRONMENTS, args), name, 1)[0]
    builder = LegacyGroupBuilder(ENVIRONMENTS, args, row, 1 if name == "closed" else 2, make_renderer())
    states: list[Any] = []
    env = load_legacy(ENVIRONMENTS, args)
    rollout = env.rollout

    async def keep(*given: Any) -> Any:
        place = len(states)
        states.append(None)
        states[place] = await rollout(*given)
        return states[place]

    env.rollout, legacy.make_client = keep, Recorder
    result: dict[str, Any] = {"args": args, "replies": replies, "row": dump(row)}
    try:
        group = asyncio.run(do_group_rollout(builder, Script(*replies)))
        result["rewards"] = group.get_total_rewards()
        result["metrics"] = group.metrics_G
    except EpisodeFailedError as error:
        result["error"] = str(error)
    result["rollouts"] = [
        {"asked": requests, "state": _kept(state)} for requests, state in zip(asked, states, strict=True)
    ]
    return dump(result)


def _kept(state: Any) -> Any:
    steps = [
        {"prompt": step["prompt"], "completion": step["completion"], "response": {"id": step["response"]["id"]}}
        for step in state["trajectory"]
    ]
    return {key: state.get(key) for key in ("reward", "metrics", "error", "stop_condition")} | {"trajectory": steps}


def record() -> dict[str, Any]:
    return {"verifiers": version("verifiers"), "episodes": {name: play(name) for name in EPISODES}}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), ensure_ascii=False) + "\n")
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")
