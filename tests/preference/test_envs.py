"""Tournaments within a group: who meets whom, what a win is worth, and that no position is favoured."""

import asyncio
import pickle
from collections import Counter
from typing import Any, cast

import chz
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.envs import (
    PairwisePreferenceDataset,
    PairwisePreferenceGroupBuilder,
    PairwisePreferenceRLDatasetBuilder,
    TournamentPattern,
    get_pairs,
    get_pairs_chunked,
)
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.preference.types import Comparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.rl.records import make_records
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(TINY)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=TINY)
BOTH, ONE = TournamentPattern.ALL_PAIRS_BOTH_WAYS, TournamentPattern.ALL_PAIRS_ONE_WAY
PROMPT: list[Message] = [{"role": "user", "content": "Is it?"}]


class Longer(PreferenceModel):
    """The longer text is better, and position B a little."""

    def __init__(self, bias: float = 0.0):
        self.bias = bias

    async def __call__(self, comparison: Comparison) -> float:
        a, b = (len(get_text_content(c[0])) for c in (comparison.completion_A, comparison.completion_B))
        return 0.5 * ((b > a) - (a > b)) + self.bias


@chz.chz(typecheck=True)
class LongerBuilder(PreferenceModelBuilder):
    async def __call__(self) -> Longer:
        return Longer()


def rollout(texts: list[str], cut_off: tuple[int, ...] = (), **changes: Any) -> Any:
    fields: dict[str, Any] = {"tournament_pattern": BOTH, "preference_model": Longer(), **changes}
    builder = PairwisePreferenceGroupBuilder(PROMPT, RENDERER, num_envs=len(texts), **fields)
    turns = {}
    for i, text in enumerate(texts):
        tokens = TOKENIZER.encode(text if i in cut_off else f"{text}<|im_end|>")
        turns[i] = [said(tokens, "length" if i in cut_off else "stop")]
    return asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns)))


class TestPairs:
    @given(n=st.integers(2, 9))
    def test_every_pair_once_or_once_in_each_order(self, n: int) -> None:
        one, both = get_pairs(n, ONE), get_pairs(n, BOTH)
        assert len({frozenset(pair) for pair in one}) == len(one) == n * (n - 1) // 2
        assert sorted(both) == sorted([*one, *((j, i) for i, j in one)])

    @given(n=st.integers(2, 12), chunk=st.integers(2, 12))
    def test_in_chunks_everybody_meets_those_of_the_chunk(self, n: int, chunk: int) -> None:
        pairs = get_pairs_chunked(n, BOTH, chunk)
        last = max(0, (n - 2) // chunk)  # whom a single leftover member joins
        met = {i: {j for a, b in pairs for j in (a, b) if i in (a, b) and j != i} for i in range(n)}
        of = [min(i // chunk, last) for i in range(n)]
        assert all(met[i] == {j for j in range(n) if j != i and of[j] == of[i]} and met[i] for i in range(n))
        counts = Counter(i for pair in pairs for i in pair)
        assert all(counts[i] == 2 * len(met[i]) for i in range(n))

    def test_chunks_of_one_are_refused_and_one_alone_has_no_pairs(self) -> None:
        with pytest.raises(ConfigurationError, match="without an opponent"):
            get_pairs_chunked(4, ONE, 1)
        assert get_pairs_chunked(1, ONE, 4) == []


class TestGroupsWithMissingMembers:
    """MinViableGroup grades those that came through."""

    @staticmethod
    def roll_out(size: int, least: int, failing: set[int]) -> TrajectoryGroup:
        class Fails(ScriptedCompleter):
            async def __call__(self, model_input, stop, *, max_tokens=None):
                if self._key in failing:
                    raise OSError("lost")
                return await super().__call__(model_input, stop, max_tokens=max_tokens)

            def fork(self, *key):
                forked = super().fork(*key)
                forked.__class__ = Fails
                return forked

        turns = {i: [said(TOKENIZER.encode("x" * (i + 1) + "<|im_end|>"))] for i in range(size)}
        builder = PairwisePreferenceGroupBuilder(PROMPT, RENDERER, BOTH, Longer(), size)
        strategy = MinViableGroup(min_successful=least, max_retries=0)
        return asyncio.run(do_group_rollout(builder, Fails(turns), strategy))

    def test_a_leftover_member_joins_the_last_chunk(self) -> None:
        group = self.roll_out(6, 5, {2})
        assert group.get_total_rewards() == pytest.approx([-0.5, -0.25, 0.0, 0.25, 0.5])

    def test_one_alone_neither_wins_nor_loses(self) -> None:
        group = self.roll_out(2, 1, {1})
        assert group.get_total_rewards() == [0.0] and group.metrics_G == [{"win_minus_loss": 0.0}]


class TestRewards:
    def test_a_reward_is_the_mean_preference_over_the_matchups(self) -> None:
        group = rollout(["x", "x" * 9, "x" * 5])
        assert group.get_total_rewards() == pytest.approx([-0.5, 0.5, 0.0])
        assert [metrics["win_minus_loss"] for metrics in group.metrics_G] == pytest.approx([-0.5, 0.5, 0.0])

    def test_each_member_is_measured_by_its_own_number_of_matchups(self) -> None:
        """In chunks of 4, six members make one chunk of four, who have 6 matchups each, and one of two, who have 2."""
        found = rollout(["x" * n for n in (1, 2, 4, 8, 16, 32)], matchup_group_size=4)
        assert found.get_total_rewards() == pytest.approx([-1 / 2, -1 / 6, 1 / 6, 1 / 2, -1 / 2, 1 / 2])

    def test_both_orders_favour_no_position(self) -> None:
        texts = ["x", "x" * 9, "x" * 5, "x"]
        fair = rollout(texts).get_total_rewards()
        assert rollout(texts, preference_model=Longer(bias=0.4)).get_total_rewards() == pytest.approx(fair)
        one_way = rollout(texts, preference_model=Longer(bias=0.4), tournament_pattern=ONE).get_total_rewards()
        assert one_way != pytest.approx(fair)
        assert sum(fair) == pytest.approx(0)

    def test_a_reply_that_was_cut_off_pays_for_it(self) -> None:
        group = rollout(["x", "x" * 9], cut_off=(1,), format_coef=0.7)
        assert group.get_total_rewards() == pytest.approx([-0.5, 0.5 - 0.7])
        formats = [trajectory.transitions[0].metrics["format"] for trajectory in group.trajectories_G]
        assert formats == [1.0, 0.0]

    def test_the_model_sees_preprocessed_text(self) -> None:
        rewards = rollout(["aaa", "bbbbbbbb"], content_preprocessor=lambda text: text[:2]).get_total_rewards()
        assert rewards == [0.0, 0.0]

    def test_records_hold_tokens_and_reward(self) -> None:
        group = rollout(["x", "x" * 9])
        assert [record.kind for record in group.records] == ["preference"] * 2
        assert [record.content["reward"] for record in make_records(group)] == pytest.approx([-0.5, 0.5])
        assert group.records[0].content["question"] == "Is it?"

    def test_a_builder_pickles(self) -> None:
        builder = PairwisePreferenceGroupBuilder(PROMPT, RENDERER, BOTH, Longer(), 4)
        again = pickle.loads(pickle.dumps(builder))
        assert again.convo_prefix == PROMPT and again.num_envs == 4


class TestDataset:
    def dataset(self, prompts: int = 5, batch_size: int = 2, batches: int = 6) -> PairwisePreferenceDataset:
        all_prompts: list[list[Message]] = [[{"role": "user", "content": str(i)}] for i in range(prompts)]

        def make_group(prompt: list[Message]) -> PairwisePreferenceGroupBuilder:
            return PairwisePreferenceGroupBuilder(prompt, RENDERER, BOTH, Longer(), 2)

        return PairwisePreferenceDataset(all_prompts, batch_size, batches, make_group, seed=3)

    def test_batches_go_through_the_prompts(self) -> None:
        with pytest.raises(ConfigurationError, match="batch_size=6, but there are 5 prompts"):
            self.dataset(batch_size=6)
        asked = [cast(Any, group).convo_prefix[0]["content"] for i in range(5) for group in self.dataset().get_batch(i)]
        assert sorted(asked[:5]) == sorted(asked[5:]) == ["0", "1", "2", "3", "4"] and asked[:5] != asked[5:]

    def test_the_builder_asks_the_prompts_of_the_comparisons(self) -> None:
        source = ComparisonBuilderFromJsonl(train_path=str(EXAMPLE_DATA / "comparisons.jsonl"), test_size=20)
        builder = PairwisePreferenceRLDatasetBuilder(
            comparison_builder=source,
            preference_model_builder=LongerBuilder(),
            policy_model_name=TINY,
            policy_renderer_name="qwen3_instruct",
            batch_size=8,
            group_size=4,
        )
        train, test = asyncio.run(builder())
        assert (len(train), len(train.get_batch(0))) == (15, 8)
        assert test is not None and (len(test), len(test.get_batch(0))) == (1, 20)
        group = train.get_batch(0)[0]
        found = asyncio.run(asyncio.run(group.make_envs())[0].initial_observation())
        assert isinstance(found, tuple) and found[1] == RENDERER.get_stop_sequences()

    def test_chunks_that_leave_everybody_alone_are_refused_in_the_config(self) -> None:
        with pytest.raises(ConfigurationError, match="chunks of 1 leave members without an opponent"):
            PairwisePreferenceRLDatasetBuilder(
                comparison_builder=ComparisonBuilderFromJsonl(train_path="p.jsonl"),
                preference_model_builder=LongerBuilder(),
                policy_model_name=TINY,
                policy_renderer_name="qwen3_instruct",
                batch_size=8,
                group_size=5,
                matchup_group_size=1,
            )
