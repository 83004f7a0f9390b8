"""A task without debate: prompt, score, rejection of replies, records."""

import asyncio
import pickle

import pytest

from tests.debate.arena import RIGHT, TINY, WRONG, decode, make_renderer, speech
from tests.fakes import FakeServiceClient, ScriptedCompleter
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.env.single_turn import TaskEvaluatorBuilder, single_turn_group
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.records import make_records
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

ITEM = TaskItem("sum-1", "What is 7 + 5?", "12")
RENDERER = make_renderer("qwen3_instruct")


def attempt(replies: list[TokensWithLogprobs], **options) -> TrajectoryGroup:
    builder = single_turn_group(get_task("qa"), ITEM, RENDERER, len(replies), **options)
    policy = ScriptedCompleter({i: [reply] for i, reply in enumerate(replies)})
    return asyncio.run(do_group_rollout(pickle.loads(pickle.dumps(builder)), policy))


REPLIES = [
    speech(RENDERER, RIGHT),
    speech(RENDERER, WRONG),
    speech(RENDERER, "no idea"),
    speech(RENDERER, RIGHT, False),
]


class TestGroup:
    def test_one_turn_scored_by_the_task(self) -> None:
        group = attempt(REPLIES, extra_request="Be brief.")
        assert group.get_total_rewards() == [1.0, 0.0, 0.0, 1.0]
        prompts = {tuple(t.transitions[0].ob.to_ints()) for t in group.trajectories_G}
        (prompt,) = prompts
        text = decode(RENDERER, prompt)
        assert get_task("qa").system_prompt + " Be brief." in text and ITEM.question in text
        assert [t.transitions[0].metrics["stopped"] for t in group.trajectories_G] == [1.0, 1.0, 1.0, 0.0]
        assert group.is_trained() == [True] * 4

    def test_records(self) -> None:
        group = attempt(REPLIES)
        for i, record in enumerate(make_records(group)):
            content = record.content
            assert record.kind == "baseline" and content["member"] == i and group.tags == ["qa"]
            assert (content["instance_id"], content["question"], content["ground_truth"]) == (
                "sum-1",
                ITEM.question,
                "12",
            )
            assert content["completion_tokens"] == REPLIES[i].tokens
            assert content["completion_logprobs"] == REPLIES[i].logprobs
            assert content["prompt_token_count"] == len(content["prompt_tokens"])
            assert content["reward"] == content["metrics"]["task_reward"]
        summary = single_turn_group(get_task("summary"), ITEM, RENDERER, 1)
        policy = ScriptedCompleter({0: [REPLIES[0]]})
        assert [r.kind for r in asyncio.run(do_group_rollout(summary, policy)).records] == ["summary"]


class TestEvaluatorBuilder:
    def build(self, **changes):
        settings = {
            "name": "probe",
            "task": "qa",
            "model_name": TINY,
            "renderer_name": "qwen3_instruct",
            "max_tokens": 8,
        }
        return TaskEvaluatorBuilder(**{**settings, **changes})()

    def test_a_fixed_choice_for_each_seed(self) -> None:
        def chosen(**changes) -> list[str]:
            return [builder.env_thunk().item.id for builder in self.build(max_items=10, **changes)._builders]  # pyright: ignore

        assert chosen() == chosen() and len(set(chosen())) == 10
        assert chosen() != chosen(seed=1)

    def test_rollouts_are_run_as_it_says(self) -> None:
        class Renamed(RolloutHooks):
            async def on_stop_reason(self, reason: str, state: RolloutState) -> str:
                return f"renamed_{reason}"

        evaluator = self.build(max_items=2, rollout=RolloutConfig(hooks=Renamed))
        found = asyncio.run(evaluator(FakeServiceClient().new_sampler(0)))
        assert found["probe/env/all/stop/renamed_completed"] == 1

    def test_without_items_of_the_split(self, tmp_path) -> None:
        path = tmp_path / "mine.jsonl"
        path.write_text('{"question": "1+1?", "answer": "2"}\n')
        with pytest.raises(ConfigurationError, match="evaluator 'probe': the dataset has no test items"):
            self.build(dataset=str(path), split="test")
