"""Reinforcement learning from a preference model: the members of a group answer one prompt and are compared in pairs.

A member's reward is how often it wins. By default every pair is asked in both orders, so that position bias cancels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import BatchSize, GroupSize, Seeded
from tinker_cookbook.preference.comparison_policy_evaluator import preprocess_content
from tinker_cookbook.preference.preference_datasets import FromComparisons
from tinker_cookbook.preference.types import (
    Comparison,
    LabeledComparison,
    PreferenceModel,
    PreferenceModelBuilder,
    open_preference_model,
)
from tinker_cookbook.renderers import Message, Renderer, get_renderer_of_model
from tinker_cookbook.rl.item_dataset import ItemDataset
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Record,
    RLDatasetBuilder,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.utils.fields import REQUIRED, docs
from tinker_cookbook.utils.misc_utils import gather_all

Prompt: TypeAlias = list[Message]


class PreferenceEnv(OneTurnEnv):
    """A prompt whose reward comes from comparisons in the group. Metric: format, 1 if the reply
    ended by itself.
    """

    def __init__(self, convo_prefix: Prompt, policy_renderer: Renderer):
        super().__init__(policy_renderer)
        self.convo_prefix = convo_prefix

    def get_messages(self) -> Prompt:
        return self.convo_prefix

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        return 0.0, {"format": float(reply.is_clean)}


class TournamentPattern(StrEnum):
    """Which pairs of a group are compared."""

    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"
    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"


def get_pairs(n: int, pattern: TournamentPattern) -> list[tuple[int, int]]:
    """Pairs (A, B) of members 0..n-1: each pair once, the earlier member at A, or once in each order."""
    pairs = list(combinations(range(n), 2))
    if TournamentPattern(pattern) is TournamentPattern.ALL_PAIRS_ONE_WAY:
        return pairs
    return [order for i, j in pairs for order in ((i, j), (j, i))]


def get_pairs_chunked(n: int, pattern: TournamentPattern, chunk_size: int) -> list[tuple[int, int]]:
    """The pairs within consecutive chunks of `chunk_size` members: fewer comparisons for large groups.

    The last chunk may be smaller, but a single leftover member joins the previous chunk. A group of one has no pairs.
    Raises ConfigurationError for chunks of fewer than 2.
    """
    if chunk_size < 2:
        raise ConfigurationError(f"chunks of {chunk_size} leave members without an opponent; use chunks of at least 2")
    starts = [start for start in range(0, n, chunk_size) if start == 0 or n - start > 1]
    return [
        (start + i, start + j)
        for start, end in zip(starts, [*starts[1:], n], strict=True)
        for i, j in get_pairs(end - start, pattern)
    ]


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """`num_envs` replies to one prompt, rewarded by the tournament among them.

    Reward of a member = win_minus_loss + format_coef * (format - 1); win_minus_loss is the mean preference for it over
    its matchups, in [-1, 1], and sums to 0 over a group. Picklable if the preference model is.
    """

    convo_prefix: Prompt
    policy_renderer: Renderer
    tournament_pattern: TournamentPattern
    preference_model: PreferenceModel
    num_envs: int
    content_preprocessor: Callable[[str], str] | None = None
    matchup_group_size: int = 4
    format_coef: float = 1.0

    def _replies(self) -> OneTurnGroupBuilder:
        env = partial(PreferenceEnv, self.convo_prefix, self.policy_renderer)
        return OneTurnGroupBuilder(env, self.num_envs, "preference", record_kind="preference")

    async def make_envs(self) -> Sequence[OneTurnEnv]:
        return await self._replies().make_envs()

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        replies = [env.reply for env in env_group if isinstance(env, OneTurnEnv)]
        shown = [preprocess_content([reply.message], self.content_preprocessor) if reply else [] for reply in replies]
        pairs = get_pairs_chunked(len(shown), self.tournament_pattern, self.matchup_group_size)
        preferences = await gather_all(
            self.preference_model(Comparison(self.convo_prefix, shown[i], shown[j])) for i, j in pairs
        )
        won, matchups = [0.0] * len(shown), [0] * len(shown)
        for (i, j), preference in zip(pairs, preferences, strict=True):
            won[i] -= preference
            won[j] += preference
            matchups[i] += 1
            matchups[j] += 1
        rewards: list[tuple[float, Metrics]] = []
        for reply, total, count in zip(replies, won, matchups, strict=True):
            win_minus_loss = total / count if count else 0.0  # no other member succeeded
            reward = win_minus_loss + self.format_coef * (float(reply is not None and reply.is_clean) - 1)
            rewards.append((reward, {"win_minus_loss": win_minus_loss}))
        return rewards

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        return self._replies().describe_records(group, env_group)

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return self._replies().describe_members(env_group)

    def logging_tags(self) -> list[str]:
        return self._replies().logging_tags()


class PairwisePreferenceDataset(ItemDataset[PairwisePreferenceGroupBuilder]):
    """Batches of `batch_size` prompts, reshuffled for each pass; the order depends only on the seed.

    Raises ConfigurationError when there are fewer prompts than a batch needs.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        num_batches: int,
        make_group: Callable[[Prompt], PairwisePreferenceGroupBuilder],
        seed: int = 0,
    ):
        if len(prompts) < batch_size:
            raise ConfigurationError(f"batch_size={batch_size}, but there are {len(prompts)} prompts; lower batch_size")
        super().__init__(prompts, lambda prompt, key: make_group(prompt), batch_size, batch_size * num_batches, seed)


@chz.chz(typecheck=True)
class PairwisePreferenceRLDatasetBuilder(
    FromComparisons, BatchSize, GroupSize, Seeded, RLDatasetBuilder, batch_size=REQUIRED, group_size=REQUIRED
):
    """The prompts of a comparison dataset, with a preference model that judges the policy's replies to them."""

    DOCS = docs(
        comparison_builder="source of the prompts; its replies are ignored",
        batch_size="prompts per batch",
        seed="seed of the order of the prompts",
    )

    preference_model_builder: PreferenceModelBuilder = chz.field(doc="opens the preference model")
    policy_model_name: str = chz.field(doc="model whose tokenizer the policy uses")
    policy_renderer_name: str = chz.field(doc="how messages become tokens for the policy")
    num_batches: int | None = chz.field(default=None, doc="training batches; None: the full ones of one pass")
    tournament_pattern: TournamentPattern = chz.field(
        default=TournamentPattern.ALL_PAIRS_BOTH_WAYS, doc="which pairs are compared"
    )
    matchup_group_size: int = chz.field(
        default=4, doc="members that are compared with each other; larger groups are split into chunks of this size"
    )
    content_preprocessor: Callable[[str], str] | None = chz.field(
        default=None, doc="prepares a reply's text for the preference model, for example removes its reasoning"
    )
    format_coef: float = chz.field(default=1.0, doc="penalty of a reply that did not end by itself")
    with_test_set: bool = chz.field(
        default=True,
        doc="also roll out on the held-out prompts; rewards sum to 0 there, but lengths and format are informative",
    )

    @chz.validate
    def _check_chunks(self) -> None:
        chz.validators.gt(1)(self, "group_size")
        get_pairs_chunked(self.group_size, self.tournament_pattern, self.matchup_group_size)

    async def __call__(self) -> tuple[PairwisePreferenceDataset, PairwisePreferenceDataset | None]:
        train, test = self.comparison_builder.get_labeled_comparisons()
        renderer = get_renderer_of_model(self.policy_renderer_name, self.policy_model_name)
        model = await open_preference_model(self.preference_model_builder)

        def make_group(prompt: Prompt) -> PairwisePreferenceGroupBuilder:
            return PairwisePreferenceGroupBuilder(
                prompt,
                renderer,
                self.tournament_pattern,
                model,
                self.group_size,
                self.content_preprocessor,
                self.matchup_group_size,
                self.format_coef,
            )

        def dataset(labeled: Sequence[LabeledComparison], batch_size: int, batches: int) -> PairwisePreferenceDataset:
            prompts = [one.comparison.prompt_conversation for one in labeled]
            return PairwisePreferenceDataset(prompts, batch_size, batches, make_group, self.seed)

        batches = self.num_batches if self.num_batches is not None else len(train) // self.batch_size
        return (
            dataset(train, self.batch_size, batches),
            dataset(test, len(test), 1) if test and self.with_test_set else None,
        )
