"""Tool calls in a reply are run and answered in the conversation; the answer without calls is graded."""

import asyncio
import json
from typing import Any

import pytest

from tests.debate.arena import decode, encode, make_renderer, reply_ids
from tests.fakes import ScriptedCompleter, said
from tests.rl.arena import forever, run
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, RendererError, RolloutTimeoutError, TrainingError
from tinker_cookbook.renderers import Message, ToolCall
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_presets import RolloutConfig, agentic
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Metrics, Trajectory
from tinker_cookbook.tool_use import (
    AgentToolMessageEnv,
    ArticleSearch,
    ToolInput,
    ToolRegistry,
    ToolResult,
    build_agent_tool_env,
    calculate,
    simple_tool_result,
    tool,
)
from tinker_cookbook.tool_use.agent_tool_message_env import tool_conversation

QWEN = make_renderer("qwen3_instruct")
TOOLS = ToolRegistry([tool(calculate)])


def call(expression: str) -> str:
    body = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


async def grade(messages: list[Message]) -> tuple[float, Metrics]:
    return float(messages[-1]["content"] == "1692"), {"messages": len(messages)}


def make_env(tools: ToolRegistry = TOOLS, **options: Any) -> AgentToolMessageEnv:
    messages = tool_conversation(QWEN, TOOLS, "Be exact.", "What is 47 * 36?")
    return AgentToolMessageEnv(tools, messages, options.pop("max_turns", None), grade, **options)


def play(replies: list[str], env: AgentToolMessageEnv | None = None, limits: RolloutLimits | None = None) -> Trajectory:
    turns = [said(reply_ids(QWEN, reply)) for reply in replies]
    adapter = EnvFromMessageEnv(QWEN, env or make_env(), rollout_limits=limits)
    return asyncio.run(run_rollout(ScriptedCompleter({0: turns}), adapter))


def test_a_call_is_run_and_its_result_shown() -> None:
    trajectory = play([call("47 * 36"), "1692"])
    assert [turn.reward for turn in trajectory.transitions] == [0, 1]
    first, second = (decode(QWEN, turn.ob.to_ints()) for turn in trajectory.transitions)
    assert '"name": "calculate"' in first and "Be exact." in first
    assert second.endswith("<tool_response>\n1692\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    metrics = trajectory.transitions[-1].metrics
    assert (metrics["tool_calls"], metrics["tool_errors"], metrics["used_tools"], metrics["messages"]) == (1, 0, 1, 5)


def test_the_episode_is_one_datum_that_trains_the_policy_s_tokens_alone() -> None:
    replies = [call("47*36") + "\n" + call("1+1"), call("47 * 36"), "1692"]
    (datum,) = trajectory_to_data(play(replies), 1.0)
    sampled = sum(len(reply_ids(QWEN, reply)) for reply in replies)
    assert sum(datum.loss_fn_inputs["mask"].tolist()) == sampled


def test_an_answer_without_a_call_is_graded_at_once() -> None:
    trajectory = play(["12"])
    assert [turn.reward for turn in trajectory.transitions] == [0]
    assert trajectory.transitions[0].metrics["used_tools"] == 0


@pytest.mark.parametrize("expression", ["9**9**9", "__import__('os')", "(1).real", "1/0"])
def test_a_malicious_expression_is_answered_with_an_error(expression: str) -> None:
    trajectory = play([call(expression), "1692"])
    assert "Error: " in decode(QWEN, trajectory.transitions[1].ob.to_ints())
    assert trajectory.transitions[-1].metrics["tool_errors"] == 1


def test_of_calls_beyond_the_limit_the_first_run_and_the_episode_is_graded() -> None:
    limits = RolloutLimits(max_tool_calls=2)
    trajectory = play([call("1"), f"{call('47 * 36')}\n{call('3')}", "never said"], limits=limits)
    assert [turn.reward for turn in trajectory.transitions] == [0, 1] and trajectory.stop_reason == "max_tool_calls"
    last = trajectory.transitions[-1]
    assert (last.metrics["tool_calls"], last.metrics["max_tool_calls"], last.metrics["messages"]) == (2, 1, 6)
    assert last.logs["tool_calls_dropped"] == "1 beyond max_tool_calls=2 were not run"
    none_left = play([call("1"), call("2")], limits=RolloutLimits(max_tool_calls=1)).transitions[-1].metrics
    assert (none_left["tool_calls"], none_left["stop/max_tool_calls"]) == (1, 1)
    assert play([call("1"), "1692"], make_env(max_tool_calls=1)).stop_reason == "completed"
    with pytest.raises(ConfigurationError, match="max_tool_calls=0"):
        make_env(max_tool_calls=0)


def test_without_tools_every_reply_is_the_answer() -> None:
    asked: list[Message] = [{"role": "user", "content": "What is 47 * 36?"}]
    env = build_agent_tool_env(QWEN, [], asked, grade)
    trajectory = asyncio.run(run_rollout(ScriptedCompleter({0: [said(reply_ids(QWEN, "1692"))]}), env))
    assert (trajectory.transitions[0].reward, trajectory.stop_reason) == (1, "completed")
    called = play([call("1"), "1692"], AgentToolMessageEnv([], asked, None, grade))
    assert "there are no tools" in decode(QWEN, called.transitions[1].ob.to_ints())


def test_turns_are_logged_for_people() -> None:
    first, last = play([f"Now.{call('47 * 36')}", "1692"]).transitions
    assert first.logs == {
        "assistant_content": "Now.",
        "tool_call_0": 'calculate({"expression": "47 * 36"})',
        "tool_result_0": "1692",
    }
    assert last.logs == {"assistant_content": "1692"}


def test_a_way_to_run_tools_that_there_is_not() -> None:
    with pytest.raises(NotImplementedError, match=r"'concurrent_safe'.*choose one of parallel, sequential"):
        make_env(tool_execution="concurrent_safe")


def test_a_conversation_under_way() -> None:
    begun: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    env = make_env(history=begun)
    assert asyncio.run(env.initial_observation()) == begun
    assert play(["1692"], env).transitions[0].metrics["messages"] == 3 and len(begun) == 2


class TestGrading:
    @staticmethod
    def graded(policy: TerminationRewardPolicy | None) -> int:
        return int(play(["1692"], make_env(termination_policy=policy)).transitions[0].metrics["messages"])

    def test_sees_the_episode_or_all(self) -> None:
        assert self.graded(TerminationRewardPolicy()) == 1
        assert self.graded(TerminationRewardPolicy(pass_all_messages_to_grader=True)) == self.graded(None) == 3

    def test_takes_its_time_at_most(self) -> None:
        async def hangs(messages: list[Message]) -> tuple[float, Metrics]:
            await forever()
            return 0.0, {}

        asked: list[Message] = [{"role": "user", "content": "?"}]
        policy = TerminationRewardPolicy(grader_timeout_seconds=900.0)
        env = AgentToolMessageEnv([], asked, None, hangs, termination_policy=policy)
        with pytest.raises(RolloutTimeoutError, match="reward_fn was not done after grader_timeout_seconds=900"):
            run(env.step({"role": "assistant", "content": "done"}))


BAD_CALL = '<tool_call>\n{"name": "calculate", "arguments": {\n</tool_call>'


class TestTrouble:
    """Calls that cannot be parsed, and exceptions inside a tool."""

    @staticmethod
    def play(replies: list[str], **options: Any) -> Trajectory:
        @tool
        def calculate(expression: str) -> str:
            """Fail."""
            raise ConnectionError("no line")

        return play(replies, make_env(ToolRegistry([calculate]), **{"tool_errors": "answer", **options}))

    @pytest.mark.parametrize(
        ("reply", "told", "counted"),
        [
            (BAD_CALL, "Error: this tool call cannot be read: ", (1, 1, 1, 0)),
            (call("1"), "Error: calculate failed: ConnectionError: no line", (1, 1, 0, 1)),
            (f"{call('1')}\n{BAD_CALL}", "Error: this tool call cannot be read: ", (2, 2, 1, 1)),
        ],
    )
    def test_the_model_is_told_and_goes_on(self, reply: str, told: str, counted: tuple[int, ...]) -> None:
        trajectory = self.play([reply, "1692"])
        assert [turn.reward for turn in trajectory.transitions] == [0, 1] and trajectory.stop_reason == "completed"
        shown = decode(QWEN, trajectory.transitions[1].ob.to_ints())
        assert f"<tool_response>\n{told}" in shown
        metrics = trajectory.transitions[-1].metrics
        names = ("tool_calls", "tool_errors", "unparsed_tool_calls", "tool_exceptions")
        assert tuple(metrics[name] for name in names) == counted
        assert trajectory.transitions[0].metrics.get("parse_error", 0) == float(BAD_CALL in reply)
        (datum,) = trajectory_to_data(trajectory, 1.0)
        assert sum(datum.loss_fn_inputs["mask"].tolist()) == len(reply_ids(QWEN, reply)) + len(reply_ids(QWEN, "1692"))

    @pytest.mark.parametrize("reply", [BAD_CALL, call("1")])
    def test_the_episode_may_end_instead(self, reply: str) -> None:
        trajectory = self.play([reply, "1692"], tool_errors="end")
        assert (len(trajectory.transitions), trajectory.stop_reason) == (1, "tool_error")
        assert trajectory.transitions[0].reward == 0

    def test_or_the_run(self) -> None:
        with pytest.raises(ConnectionError, match="no line"):
            self.play([call("1")], tool_errors="raise")
        with pytest.raises(TrainingError, match="tool_errors=raise, and a tool call cannot be parsed"):
            self.play([BAD_CALL], tool_errors="raise")

    def test_the_run_s_settings_count_more_than_the_env_s(self) -> None:
        env = make_env()
        policy = ScriptedCompleter({0: [said(reply_ids(QWEN, BAD_CALL))]})
        config = RolloutConfig(tool_errors="end")
        trajectory = asyncio.run(run_rollout(policy, EnvFromMessageEnv(QWEN, env), config=config))
        assert trajectory.stop_reason == "tool_error"

    def test_calls_that_cannot_be_parsed_count_towards_the_limit(self) -> None:
        env = make_env(tool_errors="answer")
        trajectory = play([BAD_CALL, BAD_CALL, "1692"], env, limits=RolloutLimits(max_tool_calls=1))
        assert (len(trajectory.transitions), trajectory.stop_reason) == (2, "max_tool_calls")

    @pytest.mark.parametrize(("terminate", "rewards"), [(True, [-0.1]), (False, [-0.1, 1])])
    def test_without_either_it_is_a_parse_error(self, terminate: bool, rewards: list[float]) -> None:
        trajectory = self.play([BAD_CALL, "1692"], tool_errors=None, terminate_on_parse_error=terminate)
        assert [turn.reward for turn in trajectory.transitions] == pytest.approx(rewards)
        metrics = trajectory.transitions[0].metrics
        assert metrics["parse_error"] == 1 and ("stop/parse_error" in metrics) is terminate
        assert not terminate or metrics["unparsed_tool_calls"] == 1
        out_of_turns = self.play([BAD_CALL], tool_errors=None, terminate_on_parse_error=False, max_turns=1)
        assert (out_of_turns.stop_reason, out_of_turns.transitions[0].metrics["max_turns"]) == ("parse_error", 1)

    def test_beside_a_call_that_can_be_parsed_it_costs_nothing(self) -> None:
        policy = ParseErrorPolicy(max_consecutive=1, penalty_per_error=0.5)
        replies = [f"{call('47 * 36')}\n{BAD_CALL}", "1692"]
        first, last = play(replies, make_env(parse_error_policy=policy)).transitions
        assert (first.reward, last.reward, first.metrics["parse_error"]) == (0, 1, 1)
        shown = decode(QWEN, last.ob.to_ints())
        assert "<tool_response>\n1692\n" in shown and "this tool call cannot be read" in shown

    def test_in_a_row_only_so_many_are_answered(self) -> None:
        policy = ParseErrorPolicy(
            max_consecutive=1, penalty_per_error=0.125, terminal_reward=-2.0, mask_error_turns=True
        )
        trajectory = play([BAD_CALL, call("1"), BAD_CALL, BAD_CALL], make_env(parse_error_policy=policy))
        assert [turn.reward for turn in trajectory.transitions] == [-0.125, 0, -0.125, -2]
        assert [turn.metrics.get("parse_error_masked") for turn in trajectory.transitions] == [1, None, 1, 1]
        assert trajectory.stop_reason == "parse_error"
        (datum,) = trajectory_to_data(trajectory, 1.0)
        assert sum(datum.loss_fn_inputs["mask"].tolist()) == len(reply_ids(QWEN, call("1")))

    def test_the_last_turn_is_not_answered(self) -> None:
        policy = ParseErrorPolicy(max_consecutive=3, terminal_reward=-0.25)
        trajectory = play([BAD_CALL, "never said"], make_env(parse_error_policy=policy, max_turns=1))
        assert (len(trajectory.transitions), trajectory.stop_reason) == (1, "parse_error")
        assert trajectory.transitions[0].reward == -0.25

    def test_a_parse_error_policy_still_answers_in_its_own_way(self) -> None:
        policy = ParseErrorPolicy(max_consecutive=1, penalty_per_error=0.5)
        adapter = EnvFromMessageEnv(QWEN, make_env(), parse_error_policy=policy)
        turns = [said(reply_ids(QWEN, reply)) for reply in (BAD_CALL, "1692")]
        trajectory = asyncio.run(run_rollout(ScriptedCompleter({0: turns}), adapter))
        assert [turn.reward for turn in trajectory.transitions] == [-0.5, 1]
        assert "could not be read" in decode(QWEN, trajectory.transitions[1].ob.to_ints())


def test_how_calls_run_is_the_env_s_unless_the_run_says_sequential() -> None:
    for config, expected in ((RolloutConfig(tool_execution="sequential"), "sequential"), (RolloutConfig(), "parallel")):
        env = make_env()
        policy = ScriptedCompleter({0: [said(reply_ids(QWEN, "1692"))]})
        asyncio.run(run_rollout(policy, EnvFromMessageEnv(QWEN, env), config=config))
        assert env.tool_execution == expected


def test_a_renderer_without_tools_says_so() -> None:
    with pytest.raises(RendererError, match="has no tool format"):
        tool_conversation(make_renderer("role_colon"), TOOLS, "", "?")


def test_a_tool_may_end_the_episode_which_is_graded_as_it_stands() -> None:
    @tool
    def submit(answer: str) -> ToolResult:
        """Hand in the answer."""
        return simple_tool_result(answer, should_stop=answer != "?", metrics={"handed_in": 1})

    def reward(messages: list[Message]) -> tuple[float, Metrics]:
        return float(messages[-1]["content"] == "1692"), {"messages": len(messages)}

    tools = ToolRegistry([submit])
    call = '<tool_call>\n{"name": "submit", "arguments": {"answer": "%s"}}\n</tool_call>'
    messages = tool_conversation(QWEN, tools, "", "What is 47 * 36?")
    env = AgentToolMessageEnv(tools, messages, None, reward)
    first, last = play([call % "?", call % "1692"], env).transitions
    assert (first.reward, first.metrics["handed_in"], last.reward) == (0, 1, 1)
    assert (last.metrics["stop/tool_stopped"], last.metrics["handed_in"], last.metrics["messages"]) == (1, 1, 6)


def test_the_last_turn_is_graded_with_what_its_calls_gave() -> None:
    trajectory = play([call("2 * 3"), call("47 * 36"), "never said"], make_env(max_turns=2))
    assert (len(trajectory.transitions), trajectory.stop_reason) == (2, "max_turns")
    assert trajectory.transitions[-1].reward == 1 and trajectory.transitions[-1].metrics["tool_calls"] == 2
    with pytest.raises(ConfigurationError, match="max_turns=0: must be at least 1"):
        make_env(max_turns=0)


class TestBuilder:
    MESSAGES = tool_conversation(QWEN, TOOLS, "Be exact.", "What is 47 * 36?")

    def play(self, replies: list[str], **options: Any) -> Trajectory:
        env = build_agent_tool_env(QWEN, [tool(calculate)], self.MESSAGES, grade, **options)
        turns = [said(reply_ids(QWEN, reply)) for reply in replies]
        return asyncio.run(run_rollout(ScriptedCompleter({0: turns}), env))

    def test_an_episode(self) -> None:
        trajectory = self.play([call("47 * 36"), "1692"], max_turns=5)
        assert sum(turn.reward for turn in trajectory.transitions) == 1 and trajectory.stop_reason == "completed"

    def test_its_limits(self) -> None:
        assert self.play([call("47 * 36"), call("1")], max_turns=1).transitions[-1].reward == 1
        assert self.play([call("1"), call("2")], max_tool_calls=1).stop_reason == "max_tool_calls"
        overflow = self.play(["1"], max_trajectory_tokens=5, context_overflow_reward=-0.25)
        assert overflow.transitions[0].reward == -0.25
        assert len(self.play([call("1")] * 9).transitions) == 5
        broken = self.play(["<tool_call>\n{\n</tool_call>"], failed_parse_reward=-0.5)
        assert (broken.transitions[0].reward, broken.stop_reason) == (-0.5, "parse_error")

    def test_a_config_says_what_nothing_else_does(self) -> None:
        config = RolloutConfig(
            limits=RolloutLimits(max_turns=1, max_tool_calls=1),
            parse_errors=ParseErrorPolicy(max_consecutive=1),
            tool_execution="sequential",
        )
        env = build_agent_tool_env(QWEN, [tool(calculate)], self.MESSAGES, grade, rollout_config=config, max_turns=3)
        assert isinstance(env.message_env, AgentToolMessageEnv)
        assert (env.message_env.max_turns, env.message_env.max_tool_calls) == (3, 1)
        assert env.message_env.tool_execution == "sequential"
        assert env.parse_error_policy == config.parse_errors == env.message_env.parse_error_policy
        assert env.rollout_limits == config.limits and env.terminate_on_length
        tighter = build_agent_tool_env(
            QWEN,
            [],
            self.MESSAGES,
            grade,
            rollout_config=RolloutConfig(limits=RolloutLimits(max_tool_calls=2)),
            max_tool_calls=9,
        )
        assert isinstance(tighter.message_env, AgentToolMessageEnv) and tighter.message_env.max_tool_calls == 2

    def test_a_model_made_for_agents_has_its_own_config(self) -> None:
        env = build_agent_tool_env(QWEN, [], self.MESSAGES, grade, model_name="thinkingmachines/Inkling")
        assert isinstance(env.message_env, AgentToolMessageEnv)
        assert (env.message_env.max_turns, env.message_env.max_tool_calls) == (10, 30)
        assert env.message_env.termination_policy == agentic().termination
        assert env.rollout_limits == agentic().limits
        for name, offered in (("Qwen/Qwen3-8B", RolloutLimits()), (None, None)):
            env = build_agent_tool_env(QWEN, [], self.MESSAGES, grade, model_name=name)
            assert isinstance(env.message_env, AgentToolMessageEnv) and env.message_env.max_turns == 5
            assert env.rollout_limits == offered and env.terminate_on_length

    @pytest.mark.parametrize("limit", ["max_trajectory_tokens", "max_sampled_tokens", "max_turn_tokens"])
    def test_where_tokens_are_bounded_a_reply_that_was_cut_off_is_gone_on_with(self, limit: str) -> None:
        config = RolloutConfig(limits=RolloutLimits(**{limit: 4000}))
        assert not build_agent_tool_env(QWEN, [], self.MESSAGES, grade, rollout_config=config).terminate_on_length
        ends = build_agent_tool_env(QWEN, [], self.MESSAGES, grade, rollout_config=config, terminate_on_length=True)
        assert ends.terminate_on_length
        env = build_agent_tool_env(QWEN, [], self.MESSAGES, grade, rollout_config=config)
        replies = [said(encode(QWEN, "I th"), "length"), said(reply_ids(QWEN, "1692"))]
        trajectory = asyncio.run(run_rollout(ScriptedCompleter({0: replies}), env))
        assert [turn.reward for turn in trajectory.transitions] == [0, 1]
        assert "I th<|im_end|>" in decode(QWEN, trajectory.transitions[1].ob.to_ints())

    def test_what_follows_a_call_that_cannot_be_parsed_is_the_configs_to_say(self) -> None:
        replies = ["<tool_call>\n{\n</tool_call>", "1692"]
        answered = self.play(replies, rollout_config=RolloutConfig(tool_errors="answer"))
        assert [turn.reward for turn in answered.transitions] == [0, 1]
        assert answered.transitions[-1].metrics["unparsed_tool_calls"] == 1
        ended = self.play(replies, rollout_config=RolloutConfig(tool_errors="end"))
        assert (len(ended.transitions), ended.stop_reason) == (1, "tool_error")
        assert len(self.play(replies, rollout_config=RolloutConfig()).transitions) == 1  # terminate_on_parse_error


class TestSearch:
    ARTICLES = (
        "A storm hit Coldwater.",
        "The hockey cup went to Harrowgate.",
        "Hockey is played on ice, hockey fans say.",
    )

    def test_the_best_article_comes_first(self) -> None:
        search = ArticleSearch(self.ARTICLES)
        assert search.find("harrowgate hockey", k=3) == [self.ARTICLES[1], self.ARTICLES[2]]
        assert search.find("Coldwater") == [self.ARTICLES[0]]

    @pytest.mark.parametrize("query", ["", "   ", "zebra", "the", "?!"])
    def test_nothing_found_is_said(self, query: str) -> None:
        result = asyncio.run(ArticleSearch(self.ARTICLES).tool().run(ToolInput({"query": query})))
        assert result.messages[0]["content"] == "No article has any of these words."

    def test_long_articles_and_queries_are_bounded(self) -> None:
        tools = ToolRegistry([ArticleSearch(self.ARTICLES, max_characters=10).tool()])
        arguments = [json.dumps({"query": query}) for query in ("Coldwater", "x" * 201)]
        calls = [ToolCall(function=ToolCall.FunctionBody(name="search", arguments=text)) for text in arguments]
        answers = asyncio.run(tools.call_all(calls))
        assert [result.messages[0]["content"] for result in answers] == [
            "A storm hi...",
            "Error: the query has 201 characters; at most 200 are allowed",
        ]

    def test_the_shipped_articles_are_found_by_their_summaries(self) -> None:
        path = EXAMPLE_DATA / "summary" / "articles_train.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        search = ArticleSearch.from_jsonl(path)
        found = sum(search.find(row["highlights"][:200]) == [row["article"]] for row in rows)
        assert found >= 0.9 * len(rows)

    def test_no_articles(self) -> None:
        with pytest.raises(ConfigurationError, match="articles is empty"):
            ArticleSearch([])
