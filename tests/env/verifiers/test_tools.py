"""Tasksets of verifiers with tool servers: calls in the renderer's own format, and every prompt goes on from the last one."""

import asyncio
from typing import Any

import pytest

from tests.env.verifiers.scripts import CALL, Script
from tests.env.verifiers.test_verifiers import HERE, dataset, tokens_of
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout

pytestmark = pytest.mark.verifiers

TOOLS = str(HERE / "tools_taskset.py")
REPLIES = (
    "I add." + CALL.format("sums_add", '{"a": 7, "b": 5}') + CALL.format("sums_add", '{"a": 1, "b": "x"}'),
    CALL.format("sums_take", "{}"),
    "12",
)


def played(policy: TokenCompleter, **fields: Any) -> Any:
    training, _ = asyncio.run(dataset(TOOLS, group_size=1, num_batches=1, groups_per_batch=1, **fields)())
    return asyncio.run(do_group_rollout(training.get_batch(0)[0], policy))


@pytest.mark.parametrize("shared", [False, True])
def test_calls_are_answered_and_prompts_go_on_from_the_sampled_tokens(shared: bool) -> None:
    policy = Script(*REPLIES)
    group = played(policy, taskset_args={"shared": shared})
    (trajectory,), (record,) = group.trajectories_G, group.records
    assert group.get_total_rewards() == [1.0]
    assert '"name": "sums_add", "description": "Add two numbers."' in policy.prompts[0] and "Add." in policy.prompts[0]
    assert "<tool_response>\n12\n</tool_response>" in policy.prompts[1]
    assert "unable to parse string" in policy.prompts[1] and "error: unknown tool 'sums_take'" in policy.prompts[2]
    for before, after in zip(trajectory.transitions, trajectory.transitions[1:], strict=False):
        said = [*before.ob.to_ints(), *before.ac.tokens]
        assert after.ob.to_ints()[: len(said)] == said
    nodes = record.content["nodes"]
    assert tokens_of(trajectory) == [[token for node in nodes for token in node["token_ids"]]]
    assert sum(sum(node["mask"]) for node in nodes) == sum(len(turn.ac.tokens) for turn in trajectory.transitions)


def test_a_call_that_cannot_be_read_is_an_answer() -> None:
    group = played(Script('<tool_call>{"name": sums_add}</tool_call>'))
    assert group.get_total_rewards() == [0.0] and len(group.trajectories_G[0].transitions) == 1


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [("{", "error: the arguments are not valid JSON"), ("[7]", "must be a JSON object, not list")],
)
def test_arguments_that_are_none_are_told(arguments: str, answer: str) -> None:
    from tinker_cookbook.env.verifiers.in_process import _Tools

    call = {"id": "call_0", "function": {"name": "sums_add", "arguments": arguments}}
    told = asyncio.run(_Tools([], {"sums_add": ("sums", "add")}, {}).answer(call))
    assert answer in told["content"] and (told["role"], told["tool_call_id"], told["name"]) == (
        "tool",
        "call_0",
        "sums_add",
    )


def test_a_role_may_be_given_fewer_turns() -> None:
    group = played(Script(*REPLIES), verifiers_args={"agent": {"max_turns": 2}})
    assert len(group.trajectories_G[0].transitions) == 2 and group.trajectories_G[0].stop_reason == "max_turns"


def test_a_tool_may_be_switched_off() -> None:
    harness = {"id": "in-process", "disabled_tools": ["sums_add"]}
    group = played(policy := Script("12"), verifiers_args={"agent": {"harness": harness}})
    assert group.get_total_rewards() == [1.0] and "sums_add" not in policy.prompts[0]


def test_a_renderer_without_tools_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="tool 'sums_add': RoleColonRenderer has no tool format"):
        played(Script(*REPLIES), renderer_name="role_colon")
