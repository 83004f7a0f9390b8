"""Packing loses nothing and invents nothing, and a shared prefix changes neither logprobs nor gradients."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.drawn import examples
from tests.engine.helpers import (
    VOCABULARY,
    assert_close,
    assert_near,
    datum,
    drop_gradients,
    gradients,
    make_training_client,
    random_tokens,
    tolerance,
)
from tests.engine.test_families import WINDOW, write_family
from tinker_local_backend import ServiceClient, TrainingClient
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.head import Scorer
from tinker_local_backend.engine.model.packing import (
    MIN_SHARED,
    Packed,
    PrefixGroup,
    micro_batches,
    pack,
    prefix_groups,
    shared_prefix,
)

Tokens = tuple[int, ...]


@st.composite
def families(draw: st.DrawFn) -> list[Tokens]:
    """Sequences that often continue, repeat or stop short of one another."""
    sequences: list[Tokens] = []
    for _ in range(draw(st.integers(1, 9))):
        stem: Tokens = ()
        if sequences and draw(st.booleans()):
            other = draw(st.sampled_from(sequences))
            stem = other[: draw(st.integers(0, len(other)))]
        tail = draw(st.lists(st.integers(0, 2), max_size=25))
        sequences.append((*stem, *tail) or (0,))
    return sequences


@st.composite
def samples_of_one_prompt(draw: st.DrawFn) -> list[Tokens]:
    """Sequences with one header and little after it: a group that a small budget has to split."""
    header = tuple(range(draw(st.integers(MIN_SHARED, 15))))
    tails = draw(st.lists(st.lists(st.integers(50, 55), max_size=6), min_size=3, max_size=9))
    return [(*header, *tail) for tail in tails]


def visible(packed: Packed) -> dict[int, list[int]]:
    """For each row of the pass the rows that it attends to, in order, by what the plan says."""
    seen: dict[int, list[int]] = {}
    for segment in packed.segments:
        before = list(range(*segment.prefix)) if segment.prefix else []
        assert len(before) == segment.past
        for row in range(segment.start, segment.end):
            assert row not in seen
            seen[row] = [*before, *range(segment.start, row + 1)]
    return seen


def check_layout(sequences: Sequence[Tokens], groups: Sequence[PrefixGroup]) -> None:
    """Each token of each sequence is in the pass and attends to exactly what precedes it in its sequence."""
    packed = pack(sequences, groups)
    seen = visible(packed)
    members = [i for group in groups for i in group.members]
    assert sorted(packed.rows) == sorted(members) and len(set(members)) == len(members)
    assert list(seen) == list(range(len(packed.tokens)))
    assert len(packed.tokens) == len(packed.positions) == sum(group.tokens for group in groups)
    used: set[int] = set()
    for i in members:
        rows = packed.rows[i].tolist()
        used.update(rows)
        assert [packed.tokens[row] for row in rows] == list(sequences[i])
        assert [packed.positions[row] for row in rows] == list(range(len(rows)))
        for place, row in enumerate(rows):
            assert seen[row] == rows[: place + 1]
    assert used == set(range(len(packed.tokens)))


@given(first=st.lists(st.integers(0, 1)), second=st.lists(st.integers(0, 1)))
def test_shared_prefix_counts_equal_tokens(first: list[int], second: list[int]) -> None:
    pairs = list(zip(first, second, strict=False))
    expected = next((i for i, (left, right) in enumerate(pairs) if left != right), len(pairs))
    assert shared_prefix(first, second) == expected


@given(sequences=families())
def test_groups_hold_every_sequence_once_and_share_what_they_say(sequences: list[Tokens]) -> None:
    groups = prefix_groups(sequences)
    assert sorted(i for group in groups for i in group.members) == list(range(len(sequences)))
    for group in groups:
        assert len({sequences[i][: group.prefix] for i in group.members}) == 1
        if len(group.members) == 1:
            assert group.prefix == 0
        else:
            assert MIN_SHARED <= group.prefix <= min(len(sequences[i]) for i in group.members)
        whole = sum(len(sequences[i]) for i in group.members)
        assert group.tokens == whole - group.prefix * (len(group.members) - 1)
    check_layout(sequences, groups)


@given(sequences=families(), data=st.data())
def test_groups_do_not_depend_on_the_order(sequences: list[Tokens], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sequences))))
    shuffled = [sequences[i] for i in order]

    def contents(own: Sequence[Tokens]) -> Counter:
        return Counter((group.prefix, tuple(sorted(own[i] for i in group.members))) for group in prefix_groups(own))

    assert contents(shuffled) == contents(sequences)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # (tokens in common with the header, tokens after it) per sequence -> tokens left
        ([(20, 4), (20, 5), (20, 6)], 20 + 15),
        ([(20, 0), (20, 0), (20, 3)], 20 + 3),
        ([(MIN_SHARED - 1, 4), (MIN_SHARED - 1, 4)], 2 * (MIN_SHARED + 3)),
    ],
)
def test_a_header_is_kept_once(lengths: list[tuple[int, int]], expected: int) -> None:
    sequences = [(*range(common), *[100 + i] * own) for i, (common, own) in enumerate(lengths)]
    assert sum(group.tokens for group in prefix_groups(sequences)) == expected


def test_a_long_prefix_of_some_is_not_given_up_for_a_short_one_of_all() -> None:
    header, question = tuple(range(10)), tuple(range(10, 60))
    sequences = [(*header, *question, 100 + i) for i in range(4)] + [(*header, 200, 201)]
    groups = prefix_groups(sequences)
    assert {(group.members, group.prefix) for group in groups} == {((0, 1, 2, 3), 60), ((4,), 0)}


@settings(max_examples=200)
@given(sequences=families() | samples_of_one_prompt(), budget=st.integers(1, 50), at_least=st.integers(1, 12))
def test_micro_batches_keep_to_budget_and_number(sequences: list[Tokens], budget: int, at_least: int) -> None:
    passes = micro_batches(sequences, budget, at_least)
    members = [i for groups in passes for group in groups for i in group.members]
    assert sorted(members) == list(range(len(sequences)))
    assert all(group.members for groups in passes for group in groups) and all(passes)
    assert len(passes) >= min(at_least, len(sequences))
    for groups in passes:
        check_layout(sequences, groups)
        tokens = sum(group.tokens for group in groups)
        own = [i for group in groups for i in group.members]
        assert tokens <= budget or len(own) == 1
        assert tokens <= sum(len(sequences[i]) for i in own)
    # Two neighbours that fit together are one pass, unless more passes were asked for.
    if len(passes) > at_least:
        sizes = [sum(group.tokens for group in groups) for groups in passes]
        assert all(left + right > budget for left, right in pairwise(sizes))


def test_packing_behind_an_earlier_pack() -> None:
    """Prompts of two snapshots in one prefill."""
    earlier: list[Tokens] = [(1, 2, 3)]
    packed = pack(earlier, prefix_groups(earlier))
    header = tuple(range(10))
    later: list[Tokens] = [(*header, 50), (*header, 60, 61), (9, 9)]
    pack(later, prefix_groups(later), packed)
    written = [(s.start, s.end, s.past, s.prefix) for s in packed.segments]
    assert written == [
        (0, 3, 0, None),
        (3, 13, 0, None),
        (13, 14, 10, (3, 13)),
        (14, 16, 10, (3, 13)),
        (16, 18, 0, None),
    ]
    assert packed.rows[1].tolist() == [*range(3, 13), 14, 15]


# Through a model

STEM = random_tokens(30, 1)
CASES: dict[str, list[list[int]]] = {
    "samples of one prompt": [[*STEM, *random_tokens(n, n)] for n in (5, 12, 1)],
    "identical": [STEM, STEM, STEM],
    "one begins another": [STEM, [*STEM, *random_tokens(9, 2)], STEM[:20]],
    "nested": [
        [*STEM[:12], *random_tokens(20, 3)],
        [*STEM, *random_tokens(6, 4)],
        [*STEM, *random_tokens(7, 5)],
        [*STEM[:12], *random_tokens(3, 6)],
        random_tokens(4, 7),
    ],
}


def scored(tokens: Sequence[int], seed: int, width: int | None) -> tinker.Datum:
    """Targets of its own at some places of the prefix, the same as others' elsewhere; weights are all its own."""
    rng = np.random.default_rng(seed)
    shape = (len(tokens),) if width is None else (len(tokens), width)
    targets = np.random.default_rng(0).integers(0, VOCABULARY, shape)
    own = rng.random(len(tokens)) < 0.3
    targets[own] = rng.integers(0, VOCABULARY, (own.sum(), *shape[1:]))
    return datum(tokens, target_tokens=targets, weights=np.round(rng.normal(size=shape), 1).astype(np.float32))


@pytest.fixture(scope="module", params=["tied", "mistral-window", "gemma2-tied", "gemma3-tied"])
def client(
    request: pytest.FixtureRequest, service: ServiceClient, tied_model: str, tmp_path_factory: pytest.TempPathFactory
) -> TrainingClient:
    folder: Path = tmp_path_factory.mktemp("packed")
    return make_training_client(service, tied_model if request.param == "tied" else write_family(request.param, folder))


def one_by_one(
    client: TrainingClient, data: Sequence[tinker.Datum], loss_fn: str, config: dict[str, float] | None
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    logprobs = []
    for one in data:
        output = client.forward_backward([one], loss_fn, config).result()
        logprobs.append(output.loss_fn_outputs[0]["logprobs"].to_numpy())
    expected = gradients(client)
    drop_gradients(client)
    return logprobs, expected


def check_together(
    client: TrainingClient,
    data: Sequence[tinker.Datum],
    saves: bool,
    loss_fn: str = "cross_entropy",
    config: dict[str, float] | None = None,
) -> None:
    logprobs, expected = one_by_one(client, data, loss_fn, config)
    output = client.forward_backward(list(data), loss_fn, config).result()
    found = gradients(client)
    drop_gradients(client)
    assert (output.metrics["computed_tokens:sum"] < output.metrics["tokens:sum"]) == saves
    for ours, alone, one in zip(output.loss_fn_outputs, logprobs, data, strict=True):
        assert ours["logprobs"].to_numpy().shape == one.loss_fn_inputs["target_tokens"].to_numpy().shape
        assert_near(ours["logprobs"].to_numpy(), alone, atol=2e-5)
    # Where the parts of a gradient cancel, their rounding is left: the bound is one of the whole gradient.
    assert_close(found, expected, rtol=0, rtol_of_all=1e-5)


@pytest.mark.parametrize("widths", [(None,), (3,), (None, 4, 2)], ids=["(N,)", "(N, K)", "mixed"])
@pytest.mark.parametrize("case", list(CASES))
def test_sharing_a_prefix_changes_nothing(client: TrainingClient, case: str, widths: tuple[int | None, ...]) -> None:
    data = [scored(tokens, i, widths[i % len(widths)]) for i, tokens in enumerate(CASES[case])]
    assert len(STEM) > 2 * WINDOW
    check_together(client, data, saves=True)


@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences=families())
def test_any_sequences_together_are_each_alone(client: TrainingClient, sequences: list[Tokens]) -> None:
    data = [scored(tokens, i, None) for i, tokens in enumerate(sequences)]
    saves = any(group.prefix for group in prefix_groups(sequences))
    check_together(client, data, saves)


def test_a_loss_over_whole_sequences_sees_each_of_those_that_share(client: TrainingClient) -> None:
    """gspo's ratio is one of a sequence, so positions that share a score differ in their slopes."""
    data = []
    for i, tokens in enumerate(CASES["nested"]):
        one, rng = scored(tokens, i, None), np.random.default_rng(i)
        data.append(
            datum(
                tokens,
                target_tokens=one.loss_fn_inputs["target_tokens"],
                logprobs=rng.normal(-7, 0.1, len(tokens)).astype(np.float32),
                advantages=rng.normal(size=len(tokens)).astype(np.float32),
                sequence_ratio_mask=np.ones(len(tokens), dtype=np.float32),
            )
        )
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    check_together(client, data, saves=True, loss_fn="gspo", config=config)


def test_a_custom_loss_sees_each_of_those_that_share(client: TrainingClient) -> None:
    data = [scored(tokens, i, None) for i, tokens in enumerate(CASES["nested"])]

    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(lp**2).mean() * len(lp) ** 0.5 for lp in logprobs]).sum(), {}

    for one in data:
        client.forward_backward_custom([one], loss_fn).result()
    expected = gradients(client)
    drop_gradients(client)
    output = client.forward_backward_custom(data, loss_fn).result()
    assert output.metrics["computed_tokens:sum"] < output.metrics["tokens:sum"]
    found = gradients(client)
    drop_gradients(client)
    assert_close(found, expected, rtol=2e-5)


def test_a_prefix_is_computed_once_and_its_equal_targets_are_scored_once(
    client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight samples of one prompt cost the prompt once."""
    tokens = [[*STEM, 100 + i, 200 + i] for i in range(8)]
    data = [datum(own, target_tokens=np.array([*own[1:], 5]), weights=np.ones(32, dtype=np.float32)) for own in tokens]
    rows: list[int] = []
    score = Scorer.logprobs

    def counted(self: Scorer, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return score(self, hidden, targets)

    monkeypatch.setattr(Scorer, "logprobs", counted)
    output = client.forward(data, "cross_entropy").result()
    assert output.metrics["computed_tokens:sum"] == 30 + 8 * 2
    assert output.metrics["tokens:sum"] == 8 * 32
    # The last token of the prompt has another target in each sample.
    assert sum(rows) == 30 + 8 * 2 + 7


@pytest.mark.cpu_promise
def test_neighbours_of_one_length_share_a_call_of_attention(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shapes = training._run.model, []
    attend = F.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    lengths = [5, 9, 9, 9, 5]
    sequences = [torch.tensor(random_tokens(n, i), device=model.device) for i, n in enumerate(lengths)]
    positions = torch.cat([torch.arange(n, device=model.device) for n in lengths])
    found = model.hidden_states(torch.cat(sequences), positions, PackedPlan.whole(lengths), None)
    assert [(shape[0], shape[2]) for shape in shapes] == [(1, 5), (3, 9), (1, 5)] * len(model._attention)
    alone = [
        model.hidden_states(
            tokens, torch.arange(len(tokens), device=model.device), PackedPlan.whole([len(tokens)]), None
        )
        for tokens in sequences
    ]
    assert float((found - torch.cat(alone)).abs().max()) < tolerance(1e-5)
