"""A message environment before a policy of tokens: ids stay as sampled, and no reply is lost or misread in silence."""

import asyncio
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import RENDERERS, TINY, decode, encode, make_renderer, reply_ids, stop_ids
from tests.drawn import examples
from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.env.dataset import DatasetBuilder, EnvMaker, Episodes
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.message_env import (
    MOST_UNREADABLE,
    EnvFromMessageEnv,
    MessageEnv,
    MessageStepResult,
    continue_prompt,
)
from tinker_cookbook.rl.message_groups import MessageGroupBuilder
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState, run_rollout
from tinker_cookbook.rl.types import InitialObservationOverflow, StepResult, Trajectory

BAD_CALL = "<tool_call>\nno json\n</tool_call>"
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>:\r\n"), min_size=1, max_size=12)


class EchoEnv(MessageEnv):
    """Answers each reply with "go on" until `turns` were taken; the reward of a turn is its number."""

    def __init__(self, turns: int = 3, answer: Sequence[Message] = ({"role": "user", "content": "go on"},)):
        self.turns, self.answer, self.heard = turns, list(answer), list[Message]()
        self.messages: list[Message] = [{"role": "system", "content": "be"}, {"role": "user", "content": "begin"}]

    async def initial_observation(self) -> list[Message]:
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        self.heard.append(message)
        self.messages = [*self.messages, message, *self.answer]
        return MessageStepResult(len(self.heard), len(self.heard) == self.turns, self.messages, {"turn": 1})


class OpenEnv(EchoEnv):
    """Takes messages from outside, and goes on after a reply that was cut off."""

    async def observe_truncated_response(self, message: Message) -> list[Message]:
        self.messages = [*self.messages, message, {"role": "user", "content": "shorter"}]
        return self.messages

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages = [*self.messages, *messages]
        return self.messages


class ForgetfulEnv(EchoEnv):
    """Shows only the last exchange."""

    async def step(self, message: Message) -> MessageStepResult:
        result = await super().step(message)
        result.next_messages = [self.messages[1], message, *self.answer]
        return result


def play(env: EnvFromMessageEnv, turns: Sequence[TokensWithLogprobs], **options: Any) -> Trajectory:
    return asyncio.run(run_rollout(ScriptedCompleter({0: turns}), env, **options))


def step_once(env: EnvFromMessageEnv, action: list[int], reason: tinker.StopReason = "stop") -> StepResult:
    async def run() -> StepResult:
        await env.initial_observation()
        return await env.step(action, extra={"stop_reason": reason})

    return asyncio.run(run())


@pytest.fixture(params=RENDERERS)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return make_renderer(request.param)


@pytest.fixture
def qwen() -> Renderer:
    return make_renderer("qwen3_instruct")


class TestTokensStayAsTheyWereSampled:
    def test_a_whole_episode_is_one_datum_of_the_sampled_ids(self, renderer: Renderer) -> None:
        # Letter by letter: no tokenizer writes these words like that, so that a decoded and encoded reply would differ.
        odd = [token for letter in "twelve" for token in encode(renderer, letter)]
        assert odd != encode(renderer, "twelve")
        turns = [said(odd + stop_ids(renderer)) for _ in range(3)]
        trajectory = play(EnvFromMessageEnv(renderer, EchoEnv()), turns)
        (datum,) = trajectory_to_data(trajectory, 1.0)
        tokens = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].tolist()[-1])]
        last = trajectory.transitions[-1]
        assert tokens == last.ob.to_ints() + last.ac.tokens
        mask = datum.loss_fn_inputs["mask"].tolist()
        trained = [token for token, m in zip(tokens[1:], mask, strict=True) if m]
        assert trained == (odd + stop_ids(renderer)) * 3
        logprobs = [x for x, m in zip(datum.loss_fn_inputs["logprobs"].tolist(), mask, strict=True) if m]
        assert logprobs == [x for turn in turns for x in turn.logprobs]

    @pytest.mark.parametrize("name", RENDERERS)
    @examples(40)
    @given(reply=texts, answer=texts)
    def test_reads_like_a_prompt_rendered_from_text(self, name: str, reply: str, answer: str) -> None:
        renderer = make_renderer(name)
        lead = " " if name == "role_colon" else ""
        asked: list[Message] = [{"role": "user", "content": "hm"}]
        following: list[Message] = [{"role": "user", "content": answer}]
        response = reply_ids(renderer, lead + reply)
        message, _ = renderer.parse_response(response)
        prompt = renderer.build_generation_prompt(asked)
        continued = continue_prompt(renderer, prompt, response, message, following)
        said_again: Message = {"role": "assistant", "content": reply}
        rendered = renderer.build_generation_prompt([*asked, said_again, *following])
        assert continued is not None
        assert decode(renderer, continued.to_ints()) == decode(renderer, rendered.to_ints())
        assert continued.to_ints()[: prompt.length + len(response)] == prompt.to_ints() + response

    def test_tool_calls_and_results_continue_too(self, qwen: Renderer) -> None:
        call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        results: list[Message] = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
        env = EnvFromMessageEnv(qwen, EchoEnv(2, results))
        trajectory = play(env, [said(reply_ids(qwen, call)), said(reply_ids(qwen, "done"))])
        second = trajectory.transitions[1].ob.to_ints()
        message_env = env.message_env
        assert isinstance(message_env, EchoEnv)
        assert second == qwen.build_generation_prompt(message_env.messages[:5]).to_ints()
        assert len(trajectory_to_data(trajectory, 1.0)) == 1

    def test_an_env_that_rewrites_the_past_gets_prompts_of_its_own(self, qwen: Renderer) -> None:
        trajectory = play(EnvFromMessageEnv(qwen, ForgetfulEnv()), [said(reply_ids(qwen, "x"))] * 3)
        assert len(trajectory_to_data(trajectory, 1.0)) == 3
        assert "be" not in decode(qwen, trajectory.transitions[1].ob.to_ints()).split("\n")

    def test_a_renderer_that_drops_thinking_is_asked_to_render(self, qwen: Renderer) -> None:
        thinking = get_renderer("qwen3", qwen.tokenizer)
        reply = said(encode(qwen, "<think>\nhm\n</think>\n\n4") + stop_ids(qwen))
        trajectory = play(EnvFromMessageEnv(thinking, EchoEnv(2)), [reply, reply])
        assert len(trajectory_to_data(trajectory, 1.0)) == 2
        assert "hm" not in decode(qwen, trajectory.transitions[1].ob.to_ints())

    def test_role_colon_goes_on_with_tools_only_by_rendering(self) -> None:
        renderer = make_renderer("role_colon")
        prompt = renderer.build_generation_prompt([{"role": "user", "content": "a"}])
        following: list[Message] = [{"role": "system", "content": "b"}]
        reply: Message = {"role": "assistant", "content": "x"}
        assert continue_prompt(renderer, prompt, reply_ids(renderer, " x"), reply, following) is None


class TestTruncation:
    def test_a_reply_that_was_cut_off_ends_the_episode(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv())
        result = step_once(env, encode(qwen, "I th"), "length")
        assert (result.reward, result.episode_done) == (-0.1, True)
        assert result.metrics == {"max_tokens_reached": 1, "stop/max_tokens": 1}
        assert result.next_observation is not None and result.next_observation.length == 0
        assert isinstance(env.message_env, EchoEnv) and env.message_env.heard == []

    def test_an_env_may_go_on_and_the_reply_is_closed(self, renderer: Renderer) -> None:
        env = EnvFromMessageEnv(renderer, OpenEnv(), terminate_on_length=False)
        cut = encode(renderer, " I th")
        result = step_once(env, cut, "length")
        assert (result.reward, result.episode_done) == (0.0, False)
        stopped = step_once(EnvFromMessageEnv(renderer, EchoEnv(answer=[{"role": "user", "content": "shorter"}])),
                            cut + stop_ids(renderer))  # fmt: skip
        assert result.next_observation is not None and stopped.next_observation is not None
        assert result.next_observation.to_ints() == stopped.next_observation.to_ints()

    def test_an_env_that_cannot_go_on_ends(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(), terminate_on_length=False)
        result = step_once(env, encode(qwen, "I th"), "length")
        assert (result.reward, result.episode_done) == (-0.1, True)


class TestContextOverflow:
    def test_of_the_first_prompt(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(), max_trajectory_tokens=5, context_overflow_reward=-0.7)
        trajectory = play(env, [])
        assert trajectory.stop_reason == "max_tokens"
        assert "too long for the model" in str(trajectory.transitions[0].logs["initial_observation_overflow"])
        assert trajectory.transitions[0].reward == -0.7 and trajectory_to_data(trajectory, 1.0) == []

    def test_of_a_later_one_replaces_the_reward(self, qwen: Renderer) -> None:
        reply = said(reply_ids(qwen, "x"))
        first = asyncio.run(EnvFromMessageEnv(qwen, EchoEnv()).initial_observation())
        assert not isinstance(first, InitialObservationOverflow)
        limit = first[0].length + 5
        trajectory = play(EnvFromMessageEnv(qwen, EchoEnv(), max_trajectory_tokens=limit), [reply] * 3)
        assert [turn.reward for turn in trajectory.transitions] == [-0.1]
        assert trajectory.stop_reason == "context_overflow"
        assert trajectory.transitions[0].metrics["turn"] == 1

    def test_room_for_the_next_reply_counts(self, qwen: Renderer) -> None:
        first = asyncio.run(EnvFromMessageEnv(qwen, EchoEnv()).initial_observation())
        assert not isinstance(first, InitialObservationOverflow)
        for room, fits in ((4, True), (5, False)):
            env = EnvFromMessageEnv(
                qwen, EchoEnv(), max_trajectory_tokens=first[0].length + 4, max_generation_tokens=room
            )
            assert isinstance(asyncio.run(env.initial_observation()), tuple) is fits

    def test_the_last_turn_keeps_its_reward(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(1), max_trajectory_tokens=20)
        assert play(env, [said(reply_ids(qwen, "x " * 30))]).transitions[0].reward == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_trajectory_tokens": 0}, "max_trajectory_tokens=0: must be at least 1"),
            ({"max_generation_tokens": -1}, "max_generation_tokens=-1"),
            ({"max_trajectory_tokens": 8, "max_generation_tokens": 8}, "leaves no room for a prompt"),
        ],
    )
    def test_limits_that_allow_nothing_are_refused(self, qwen: Renderer, options: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            EnvFromMessageEnv(qwen, EchoEnv(), **options)  # pyright: ignore[reportArgumentType]


class Retrying(OpenEnv):
    """One that reads tool calls, and is told what to do with those that it cannot read."""

    policy: ParseErrorPolicy | None = None

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        self.policy = policy


class TestParseErrors:
    @pytest.mark.parametrize("text", [BAD_CALL, "<tool_call>\n{"])
    def test_a_call_that_cannot_be_read_is_the_env_s_matter(self, qwen: Renderer, text: str) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv())
        result = step_once(env, reply_ids(qwen, text))
        assert (result.reward, result.episode_done, result.metrics) == (1, False, {"turn": 1})
        assert isinstance(env.message_env, EchoEnv) and env.message_env.heard[0].get("unparsed_tool_calls")

    def test_a_reply_without_an_end_ends_the_episode(self, qwen: Renderer) -> None:
        result = step_once(EnvFromMessageEnv(qwen, EchoEnv()), encode(qwen, "no end"))
        assert (result.reward, result.episode_done) == (-1.0, True)
        assert result.metrics == {"parse_error": 1, "stop/parse_error": 1}
        assert play(EnvFromMessageEnv(qwen, EchoEnv()), [said(encode(qwen, "no end"))]).stop_reason == "parse_error"

    def test_or_has_its_reward_alone_and_the_policy_is_asked_again(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(1), failed_parse_reward=-0.25, terminate_on_parse_error=False)
        trajectory = play(env, [said(encode(qwen, "no end")), said(reply_ids(qwen, "fine"))])
        assert [turn.reward for turn in trajectory.transitions] == [-0.25, 1]
        first, second = trajectory.transitions
        assert first.ob == second.ob and first.metrics == {"parse_error": 1}
        assert isinstance(env.message_env, EchoEnv) and [said["content"] for said in env.message_env.heard] == ["fine"]

    def test_nobody_is_asked_for_ever(self, qwen: Renderer) -> None:
        """At temperature 0 a policy says the same to the same prompt, however often; here no limit of turns ends that."""
        env = EnvFromMessageEnv(qwen, EchoEnv(2), failed_parse_reward=-0.25, terminate_on_parse_error=False)
        bad, fine = said(encode(qwen, "no end")), said(reply_ids(qwen, "fine"))
        trajectory = play(env, [*[bad] * (MOST_UNREADABLE - 1), fine, *[bad] * (MOST_UNREADABLE + 5)])
        assert trajectory.stop_reason == "parse_error" and len(trajectory.transitions) == 2 * MOST_UNREADABLE
        assert trajectory.transitions[-1].reward == -0.25 and trajectory.transitions[-1].metrics["parse_error"] == 1

    @pytest.mark.parametrize("mask", [False, True])
    def test_or_what_the_policy_says(self, qwen: Renderer, mask: bool) -> None:
        policy = ParseErrorPolicy(max_consecutive=5, penalty_per_error=0.5, terminal_reward=-2.0, mask_error_turns=mask)
        result = step_once(EnvFromMessageEnv(qwen, OpenEnv(), parse_error_policy=policy), encode(qwen, BAD_CALL))
        assert (result.reward, result.episode_done) == (-2.0, True), "nothing can follow it, so it is never answered"
        assert result.metrics.get("parse_error_masked") == (1 if mask else None)
        assert result.logs["parse_failure_kind"] == "structural" and "malformed" in str(
            result.logs["parse_failure_detail"]
        )

    def test_an_env_that_reads_calls_is_told_of_the_policy(self, qwen: Renderer) -> None:
        policy = ParseErrorPolicy(max_consecutive=1)
        for env, options in (
            (EnvFromMessageEnv(qwen, Retrying(1), parse_error_policy=policy), {}),
            (EnvFromMessageEnv(qwen, Retrying(1)), {"parse_errors": policy}),
        ):
            play(env, [said(reply_ids(qwen, "x"))], **options)
            assert isinstance(env.message_env, Retrying) and env.message_env.policy is policy

    def test_of_one_that_reads_none_it_is_said(self, qwen: Renderer, caplog: pytest.LogCaptureFixture) -> None:
        EnvFromMessageEnv(qwen, EchoEnv(), parse_error_policy=ParseErrorPolicy())
        assert not caplog.records
        EnvFromMessageEnv(qwen, EchoEnv(), parse_error_policy=ParseErrorPolicy(max_consecutive=1))
        assert "EchoEnv reads no tool calls" in caplog.text


class TestWithTheRunner:
    def test_limits_of_the_env_are_kept(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(9), rollout_limits=RolloutLimits(max_turns=2))
        trajectory = play(env, [said(reply_ids(qwen, "x"))] * 9)
        assert (len(trajectory.transitions), trajectory.stop_reason) == (2, "max_turns")

    def test_a_hook_adds_messages_without_breaking_the_ids(self, qwen: Renderer) -> None:
        class Hint(RolloutHooks):
            async def on_turn_begin(self, state: RolloutState) -> list[Message] | None:
                return [{"role": "user", "content": "a hint"}] if state.turn_index == 1 else None

        trajectory = play(EnvFromMessageEnv(qwen, OpenEnv(2)), [said(reply_ids(qwen, "x"))] * 2, hooks=Hint())
        assert "go on<|im_end|>\n<|im_start|>user\na hint" in decode(qwen, trajectory.transitions[1].ob.to_ints())
        assert len(trajectory_to_data(trajectory, 1.0)) == 1

    def test_an_env_without_tools_cannot_count_calls(self, qwen: Renderer) -> None:
        env = EnvFromMessageEnv(qwen, EchoEnv(), rollout_limits=RolloutLimits(max_tool_calls=2))
        with pytest.raises(ConfigurationError, match="max_tool_calls=2: EchoEnv has no method set_max_tool_calls"):
            play(env, [])

    def test_a_turn_in_which_nothing_went_wrong_says_nothing_of_it(self, qwen: Renderer) -> None:
        trajectory = play(EnvFromMessageEnv(qwen, EchoEnv(2)), [said(reply_ids(qwen, "x"))] * 2)
        assert [turn.metrics for turn in trajectory.transitions] == [{"turn": 1}, {"turn": 1, "stop/completed": 1}]

    def test_a_stop_that_a_hook_clears_goes_on_from_the_last_prompt(self, qwen: Renderer) -> None:
        class Insists(RolloutHooks):
            async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
                return None if reason == "parse_error" else reason

        replies = [said(encode(qwen, "no end")), said(reply_ids(qwen, "fine"))]
        trajectory = play(EnvFromMessageEnv(qwen, EchoEnv(1)), replies, hooks=Insists())
        assert [turn.reward for turn in trajectory.transitions] == [-1, 1]
        assert trajectory.transitions[0].ob == trajectory.transitions[1].ob

    def test_a_renderer_of_ones_own_needs_three_methods(self, qwen: Renderer) -> None:
        class Three:
            get_stop_sequences, parse_response = qwen.get_stop_sequences, qwen.parse_response

            def build_generation_prompt(self, messages: list[Message]) -> tinker.ModelInput:
                return qwen.build_generation_prompt(messages)

        env = EnvFromMessageEnv(Three(), EchoEnv(2))  # pyright: ignore[reportArgumentType]
        assert len(play(env, [said(reply_ids(qwen, "x"))] * 2).transitions) == 2


class TestGroups:
    def test_members_do_not_share_an_env_and_leave_a_record(self, qwen: Renderer) -> None:
        from tinker_cookbook.rl.records import make_records
        from tinker_cookbook.rl.rollouts import do_group_rollout

        builder = MessageGroupBuilder(partial(EchoEnv, 2), 2, qwen, "echo", {"context_overflow_reward": -1.0})
        turns = {0: [said(reply_ids(qwen, "a"))] * 2, 1: [said(reply_ids(qwen, "b"))] * 2}
        group = asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns)))
        assert group.get_total_rewards() == [3, 3]
        contents = [record.content for record in make_records(group)]
        assert [c["messages"][2]["content"] for c in contents] == ["a", "b"]
        assert [len(c["turns"]) for c in contents] == [2, 2]
        assert contents[0]["turns"][1]["completion_tokens"] == reply_ids(qwen, "a")

    def test_builders_pickle(self, qwen: Renderer) -> None:
        builder = pickle.loads(pickle.dumps(MessageGroupBuilder(partial(EchoEnv, 2), 2, qwen)))
        assert len(asyncio.run(builder.make_envs())) == 2

    def test_a_batch_depends_on_its_index_alone(self, qwen: Renderer) -> None:
        class Draws(Episodes):
            async def make_env_maker(self) -> EnvMaker:
                return lambda renderer, rng: partial(EchoEnv, rng.randrange(10**6))

        def draws(order: Sequence[int]) -> dict[int, list[int]]:
            sizes = {"groups_per_batch": 3, "group_size": 1, "num_batches": 4, "num_test": 1}
            builder = DatasetBuilder(env=Draws(), model_name=TINY, renderer_name="qwen3_instruct", seed=7, **sizes)
            dataset, _ = asyncio.run(builder())
            batches = {i: dataset.get_batch(i) for i in order}
            return {i: [b.env_thunk.args[0] for b in batch] for i, batch in batches.items()}  # type: ignore[attr-defined]

        forward = draws(range(4))
        assert forward == draws([3, 1, 0, 2])
        assert len({number for batch in forward.values() for number in batch}) == 12
        with pytest.raises(IndexError):
            draws([4])


def test_a_group_renders_its_first_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make_renderer("qwen3_instruct")
    rendered: list[list[Message]] = []
    original = renderer.build_generation_prompt

    def build_generation_prompt(messages: list[Message], *args: Any, **options: Any) -> tinker.ModelInput:
        rendered.append(list(messages))
        return original(messages, *args, **options)

    monkeypatch.setattr(renderer, "build_generation_prompt", build_generation_prompt)

    async def main() -> list[Any]:
        return [await env.initial_observation() for env in await MessageGroupBuilder(EchoEnv, 3, renderer).make_envs()]

    prompts = [first[0].to_ints() for first in asyncio.run(main())]
    assert len(rendered) == 1 and prompts == [original(rendered[0]).to_ints()] * 3
