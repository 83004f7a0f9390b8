"""One prompt, one reply: what the env is told of the reply, prompts that are too long, and the group with its records."""

import asyncio
import pickle
from functools import partial
from typing import Any

import pytest

from tests.fakes import ScriptedCompleter
from tests.rl.test_problem_env import RENDERER, speech
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.records import make_records
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Metrics, TrajectoryGroup


class LengthEnv(OneTurnEnv):
    """As many points as the reply has letters; it is read when it begins with one."""

    instance_id = "length-1"

    def __init__(self, max_prompt_tokens: int | None = None):
        super().__init__(RENDERER)
        self.max_prompt_tokens = max_prompt_tokens

    def get_messages(self) -> list[Message]:
        return [{"role": "user", "content": "Say x."}]

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        flags = {"parsed": reply.text.isalpha(), "clean": reply.is_clean, "stopped": reply.stopped}
        return float(len(reply.text)), {name: float(flag) for name, flag in flags.items()}

    def get_reference_answer(self) -> str:
        return "x"


REPLIES = [speech("xx"), speech("x"), speech("777"), speech("xx", stopped=False)]
PROMPT_TOKENS = RENDERER.build_generation_prompt([{"role": "user", "content": "Say x."}]).length


def attempt(*replies: TokensWithLogprobs, max_prompt_tokens: int | None = None, **options: Any) -> TrajectoryGroup:
    builder = OneTurnGroupBuilder(partial(LengthEnv, max_prompt_tokens), len(replies), "lengths", **options)
    policy = ScriptedCompleter({i: [reply] for i, reply in enumerate(replies)})
    return asyncio.run(do_group_rollout(pickle.loads(pickle.dumps(builder)), policy))


def test_the_env_is_told_how_the_reply_ended() -> None:
    group = attempt(*REPLIES)
    assert group.get_total_rewards() == [2.0, 1.0, 3.0, 2.0]
    turns = [trajectory.transitions[-1] for trajectory in group.trajectories_G]
    assert [turn.metrics["clean"] for turn in turns] == [turn.metrics["stopped"] for turn in turns] == [1, 1, 1, 0]
    assert {turn.logs["reference"] for turn in turns} == {"x"} and group.is_trained() == [True] * 4


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"accept_min_reward": 2.0}, [True, False, True, True]),
        ({"accept_min_reward": 0.0}, [True, True, True, True]),
        ({"accept_require_parse": True}, [True, True, False, True]),
        ({"accept_min_reward": 3.0, "accept_require_parse": True}, [False] * 4),
    ],
)
def test_rejection(options: dict[str, Any], trained: list[bool]) -> None:
    group = attempt(*REPLIES, **options)
    assert group.is_trained() == trained
    assert [record.content["accepted"] for record in make_records(group)] == trained


def test_a_group_is_so_many_attempts_with_a_record_of_each() -> None:
    group = attempt(*REPLIES, record_kind="length")
    for i, record in enumerate(make_records(group)):
        content = record.content
        assert (record.kind, content["member"], group.tags) == ("length", i, ["lengths"])
        assert [content[key] for key in ("instance_id", "question", "ground_truth")] == ["length-1", "Say x.", "x"]
        assert content["completion_tokens"] == REPLIES[i].tokens
        assert content["completion_logprobs"] == REPLIES[i].logprobs
        assert content["prompt_token_count"] == len(content["prompt_tokens"]) == PROMPT_TOKENS
        assert content["reward"] == len(content["raw_response"]) == [2, 1, 3, 2][i]
    assert group.member_info_G == [{"question": "Say x.", "instance_id": "length-1", "ground_truth": "x"}] * 4


def test_a_prompt_that_is_too_long_is_not_asked_and_recorded() -> None:
    assert attempt(REPLIES[0], max_prompt_tokens=PROMPT_TOKENS).get_total_rewards() == [2.0]
    group = attempt(REPLIES[0], max_prompt_tokens=PROMPT_TOKENS - 1)
    assert group.get_total_rewards() == [0.0] and len(make_records(group)) == 1
    (turn,) = group.trajectories_G[0].transitions
    assert turn.ac.tokens == [] and turn.metrics == {"context_overflow": 1.0, "stop/context_overflow": 1}


class CountingRenderer:
    """Counts prompts."""

    def __init__(self) -> None:
        self.count = 0

    def build_generation_prompt(self, messages: list[Message]) -> Any:
        self.count += 1
        return RENDERER.build_generation_prompt(messages)

    def __getattr__(self, name: str) -> Any:
        return getattr(RENDERER, name)


class TestSharedPrompt:
    def prompts(self, texts: list[str], renderer: Any) -> list[list[int]]:
        remaining = iter(texts)

        class SaysEnv(LengthEnv):
            def __init__(self) -> None:
                super().__init__()
                self.renderer, self.messages = renderer, [Message(role="user", content=next(remaining))]

            def get_messages(self) -> list[Message]:
                return self.messages

        async def main() -> list[list[int]]:
            found = []
            for env in await OneTurnGroupBuilder(SaysEnv, len(texts)).make_envs():
                first = await env.initial_observation()
                assert isinstance(first, tuple)
                found.append(first[0].to_ints())
                env.get_messages()[0]["content"] = "changed"
            return found

        return asyncio.run(main())

    def test_a_group_renders_its_prompt_once(self) -> None:
        renderer = CountingRenderer()
        prompts = self.prompts(["Say x."] * 4, renderer)
        assert renderer.count == 1
        assert prompts == [RENDERER.build_generation_prompt([{"role": "user", "content": "Say x."}]).to_ints()] * 4

    def test_members_that_show_something_else_have_their_own(self) -> None:
        renderer = CountingRenderer()
        texts = ["a", "b", "b", "changed", "a"]
        prompts = self.prompts(texts, renderer)
        own = [RENDERER.build_generation_prompt([{"role": "user", "content": text}]).to_ints() for text in texts]
        assert prompts == own and renderer.count == 4
