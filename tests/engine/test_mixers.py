"""Segments of sequences in one pass through a module with states: each gets what it has when its sequence runs alone.

The modules run on random hidden states, without the model around them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.engine.devices import here
from tests.engine.direct import frozen_adapter
from tests.engine.helpers import tolerance
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter, Spans, group_rows
from tinker_local_backend.engine.model.mixers import Mixer
from tinker_local_backend.engine.model.mixing import BLOCK, DecodeMixing, PackedMixing
from tinker_local_backend.engine.model.states import StateCache
from tinker_local_backend.engine.models import load_model

CONTINUE = ("qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear")
START_ANEW = ("jamba", "mamba")
"""Mamba 1: its module goes on from a state with one token only."""

CLOSE = 2e-5


@dataclass
class Module:
    """The first module with states of a model."""

    model: BaseModel
    mixer: Mixer

    def hidden(self, tokens: int, seed: int) -> torch.Tensor:
        """(1, tokens, hidden)"""
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn(1, tokens, self.model.config.hidden_size, generator=generator)
        return found.to(self.model.device, self.model.dtype)

    def alone(self, hidden: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """transformers' own forward of one whole sequence."""
        with self.model.routed(adapter):
            return self.mixer._forward(hidden_states=hidden)

    def packed(
        self,
        rows: Sequence[torch.Tensor],
        segments: Sequence[Segment],
        states: StateCache | None = None,
        spans: Spans | None = None,
    ) -> torch.Tensor:
        """One pass: (1, T, hidden)."""
        model = self.model
        plan = PackedPlan(segments, states=states)
        mixing = PackedMixing.of(plan, spans or [], model._routing, model.device, model._continues)
        hidden = torch.cat(list(rows), dim=1)
        return mixing.mix(self.mixer._forward, self.mixer._cache_name, {"hidden_states": hidden})

    def decoded(self, hidden: torch.Tensor, states: StateCache, slots: Sequence[int]) -> torch.Tensor:
        """One token (1, R, hidden) of each of R sequences."""
        mixing = DecodeMixing(states, torch.tensor(slots, device=self.model.device))
        return mixing.mix(self.mixer._forward, self.mixer._cache_name, {"hidden_states": hidden})

    def states(self, slots: int) -> StateCache:
        """With something else in them than zeros."""
        states = self.model.new_states()
        states.resize(slots)
        for stored in states._stored.values():
            stored.fill_(3.0)
        return states


@pytest.fixture(scope="module", params=[*CONTINUE, *START_ANEW])
def module(request: pytest.FixtureRequest, written_model: Callable[[str], str]) -> Module:
    model = load_model(written_model(request.param))
    assert model._continues == (request.param in CONTINUE)
    mixer = model.mixers[0].forward
    assert isinstance(mixer, Mixer) and isinstance(model.mixers[0], nn.Module)
    return Module(model, mixer)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def assert_equal_up_to_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert difference(found, expected) < (tolerance(CLOSE) if here().dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_whole_sequences_of_all_lengths(module: Module) -> None:
    """Those in one block of lengths are padded to the longest."""
    lengths = [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3, 1, BLOCK + 6]
    rows = [module.hidden(n, i) for i, n in enumerate(lengths)]
    found = module.packed(rows, PackedPlan.whole(lengths).segments)
    for ours, row in zip(found.split(lengths, dim=1), rows, strict=True):
        assert_equal_up_to_rounding(ours, module.alone(row))


@torch.no_grad()
def test_sequences_that_share_a_prefix(module: Module) -> None:
    """Two groups, one of them with tails of one token, and a sequence without a prefix between them."""
    first, second = module.hidden(9, 1), module.hidden(21, 2)
    whole = module.hidden(5, 3)
    tails = {9: [module.hidden(n, 10 + n) for n in (1, 4, 1)], 21: [module.hidden(n, 30 + n) for n in (70, 2)]}
    rows: list[torch.Tensor] = []
    segments: list[Segment] = []
    expected: list[torch.Tensor] = []

    def add(row: torch.Tensor, prefix: tuple[int, int] | None = None, before: torch.Tensor | None = None) -> None:
        start = segments[-1].end if segments else 0
        past = 0 if prefix is None else prefix[1] - prefix[0]
        segments.append(Segment(start, start + row.shape[1], past, prefix))
        rows.append(row)
        expected.append(module.alone(row if before is None else torch.cat([before, row], dim=1))[:, past:])

    for head in (first, second):
        add(head)
        prefix = segments[-1].start, segments[-1].end
        for tail in tails[head.shape[1]]:
            add(tail, prefix, head)
        add(whole)
    assert_equal_up_to_rounding(module.packed(rows, segments), torch.cat(expected, dim=1))


def test_gradients_go_through_a_prefix_to_tails_of_one_token(module: Module) -> None:
    """A module that takes one token for a step of decoding has no gradient there."""
    head, tails = module.hidden(6, 1), [module.hidden(1, 2), module.hidden(1, 3), module.hidden(4, 4)]
    for tensor in (head, *tails):
        tensor.requires_grad_()
    segments = [Segment(0, 6), Segment(6, 7, 6, (0, 6)), Segment(7, 8, 6, (0, 6)), Segment(8, 12, 6, (0, 6))]
    found = module.packed([head, *tails], segments)
    heads = module.alone(head)
    expected = torch.cat([heads, *(module.alone(torch.cat([head, t], dim=1))[:, 6:] for t in tails)], dim=1)
    weights = module.hidden(12, 5)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), [head, *tails]) for out in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert float(other.abs().max()) > 0
        assert_equal_up_to_rounding(one, other)


@torch.no_grad()
def test_a_sequence_in_pieces_goes_on_from_its_slot_in_the_next_pass(module: Module) -> None:
    """Slots hold other numbers before: a sequence that begins does not read them."""
    sequences, states = [module.hidden(30, 1), module.hidden(24, 2)], module.states(4)
    pieces = [(0, 12), (12, 13), (13, 24)]
    found = [
        module.packed(
            [sequence[:, start:end] for sequence in sequences],
            [
                Segment(i * (end - start), (i + 1) * (end - start), start, None, None, slot if start else None, slot)
                for i, slot in enumerate((3, 1))
            ],
            states,
        ).chunk(2, dim=1)
        for start, end in pieces
    ]
    for sequence, parts in zip(sequences, zip(*found, strict=True), strict=True):
        assert_equal_up_to_rounding(torch.cat(parts, dim=1), module.alone(sequence[:, :24]))
    assert all((stored[[0, 2]] == 3).all() for stored in states._stored.values()), "other slots stay as they are"


@torch.no_grad()
def test_one_pass_goes_on_from_what_it_has_stored(module: Module) -> None:
    """A prompt, its last token, and another prompt's, as prefill has them: 0 -> slot 2 -> slot 0 in one pass."""
    first, second, states = module.hidden(17, 1), module.hidden(11, 2), module.states(3)
    segments = [
        Segment(0, 16, state_to=2),
        Segment(16, 17, 16, state_from=2, state_to=0),
        Segment(17, 27, state_to=1),
        Segment(27, 28, 10, state_from=1, state_to=1),
    ]
    found = module.packed([first, second], segments, states)
    assert_equal_up_to_rounding(found, torch.cat([module.alone(first), module.alone(second)], dim=1))
    more = module.hidden(2, 9)  # slot 0 is behind all of the first, slot 2 behind all but its last token
    decoded = module.decoded(torch.cat([more[:, :1], first[:, -1:]], dim=1), states, [0, 2])
    ends = [module.alone(torch.cat([first, more[:, :1]], dim=1))[:, -1:], module.alone(first)[:, -1:]]
    assert_equal_up_to_rounding(decoded, torch.cat(ends, dim=1))


@torch.no_grad()
def test_steps_of_decoding(module: Module) -> None:
    """Rows change their order between steps, and one leaves."""
    sequences, states = [module.hidden(12, i) for i in range(3)], module.states(5)
    lengths, slots = [5, 3, 4], [4, 0, 2]
    prompts = [sequence[:, :n] for sequence, n in zip(sequences, lengths, strict=True)]
    ends = [sum(lengths[: i + 1]) for i in range(3)]
    module.packed(
        prompts, [Segment(e - n, e, state_to=s) for e, n, s in zip(ends, lengths, slots, strict=True)], states
    )
    for rows in ([0, 1, 2], [2, 0, 1], [1, 2], [1, 2]):
        hidden = torch.cat([sequences[i][:, lengths[i] : lengths[i] + 1] for i in rows], dim=1)
        found = module.decoded(hidden, states, [slots[i] for i in rows])
        for i, ours in zip(rows, found.split(1, dim=1), strict=True):
            lengths[i] += 1
            assert_equal_up_to_rounding(ours, module.alone(sequences[i][:, : lengths[i]])[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_sequence_has_its_own_adapter(module: Module, interleaved: bool) -> None:
    """Segments of several adapters are in one batch, in any order, and one has none."""
    model = module.model
    if not any(name.startswith(_path(module)) for name in model.linears):
        pytest.skip("no adapter on this module")
    adapters = [None, *(frozen_adapter(model, 2 + i, i) for i in range(2))]
    order = [0, 1, 2, 1, 0, 2] if interleaved else [0, 0, 1, 1, 2, 2]
    lengths = [4, 5, 6, 1, 3, 70]
    rows = [module.hidden(n, i) for i, n in enumerate(lengths)]
    spans = group_rows(
        [adapters[which] for which, n in zip(order, lengths, strict=True) for _ in range(n)], model.device
    )
    found = module.packed(rows, PackedPlan.whole(lengths).segments, spans=spans)
    without = module.packed(rows, PackedPlan.whole(lengths).segments)
    assert difference(without, found) > 0.01
    for which, ours, row in zip(order, found.split(lengths, dim=1), rows, strict=True):
        assert_equal_up_to_rounding(ours, module.alone(row, adapters[which]))


@torch.no_grad()
def test_sequences_with_their_own_adapters_go_on_from_slots(module: Module) -> None:
    """The second pieces are as long as one another, so they are one batch."""
    model = module.model
    if not any(name.startswith(_path(module)) for name in model.linears):
        pytest.skip("no adapter on this module")
    adapters = [None, *(frozen_adapter(model, 2 + i, i) for i in range(2))]
    rows, states = [module.hidden(13, i) for i in range(3)], module.states(3)
    for start, end in ((0, 9), (9, 13)):
        count = end - start
        segments = [Segment(i * count, (i + 1) * count, start, None, None, i if start else None, i) for i in range(3)]
        spans = group_rows([adapter for adapter in adapters for _ in range(count)], model.device)
        found = module.packed([row[:, start:end] for row in rows], segments, states, spans).split(count, dim=1)
        for ours, row, adapter in zip(found, rows, adapters, strict=True):
            assert_equal_up_to_rounding(ours, module.alone(row, adapter)[:, start:end])


def _path(module: Module) -> str:
    return next(path for path, one in module.model.module.named_modules() if one is module.model.mixers[0])


def test_segments_of_like_lengths_are_one_batch(module: Module) -> None:
    """However many there are; those whose last state is stored are never padded."""
    model = module.model

    def counts(segments: Sequence[Segment]) -> list[tuple[int, int]]:
        plan = PackedPlan(segments, states=model.new_states())
        mixing = PackedMixing.of(plan, [], model._routing, model.device, model._continues)
        return sorted((batch.count, batch.length) for batch in mixing.batches)

    lengths = [3, BLOCK, 9, BLOCK + 1, 2 * BLOCK, 1]
    assert counts(PackedPlan.whole(lengths).segments) == [(2, 2 * BLOCK), (4, BLOCK)]
    kept = [Segment(0, 3, state_to=0), Segment(3, 6, state_to=1), Segment(6, 10, state_to=2), Segment(10, 13)]
    assert counts(kept) == [(1, 3), (1, 4), (2, 3)]


@pytest.mark.parametrize("prefix", [False, True])
def test_recomputed_layers_give_the_same_gradients(module: Module, prefix: bool) -> None:
    model = module.model
    if model._uncovered:
        pytest.skip("it is not trained")
    adapter = model.new_adapter(model.widest_spec(4), 0)
    with torch.no_grad():
        for matrix in adapter.b.values():
            drawn = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(len(matrix)))
            matrix.copy_(0.05 * drawn)
    tokens = torch.arange(20, device=model.device) * 7 + 3
    segments = (
        [Segment(0, 12), Segment(12, 17, 12, (0, 12)), Segment(17, 20, 12, (0, 12))] if prefix else [Segment(0, 20)]
    )
    positions = torch.tensor(
        [n for s in segments for n in range(s.past, s.past + s.end - s.start)], device=model.device
    )
    found: list[list[torch.Tensor | None]] = []
    for recompute in (False, True):
        with model.recompute(recompute), model.routed(adapter):
            hidden, backward = model.training_pass(tokens, positions, PackedPlan(segments), adapter)
            found.append(backward(torch.ones_like(hidden) / (1 + torch.arange(hidden.shape[1], device=model.device))))
    for kept, again in zip(*found, strict=True):
        assert (kept is None) == (again is None)
        if kept is not None and again is not None and float(kept.abs().max()) > 0:
            assert_equal_up_to_rounding(again, kept)
    assert any(kept is not None and float(kept.abs().max()) > 0 for kept in found[0])
