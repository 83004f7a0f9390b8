"""The comparison of full fine-tuning with TRL's, without TRL: what is handed to it, and what is said of two curves."""

import asyncio
import importlib.util

import pytest
import tinker
import torch

from benchmarks import full_fine_tuning
from benchmarks.errors import BenchmarkError
from benchmarks.full_fine_tuning import FullConfig, apart, sequence
from benchmarks.peers.trl_learning import mean_per_sequence


def datum(weights: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch(torch.tensor([6, 7, 8])),
            "weights": tinker.TensorData.from_torch(torch.tensor(weights)),
        },
    )


def test_a_sequence_has_the_tokens_of_its_datum_and_a_mask_of_the_targets() -> None:
    assert sequence(datum([0.0, 0.5, 0.5])) == ([5, 6, 7, 8], [0, 0, 1, 1])
    with pytest.raises(BenchmarkError, match="weights that are not a mean over its targets"):
        sequence(datum([0.0, 0.25, 0.75]))


def test_the_loss_is_a_mean_of_means() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 4, 6), torch.tensor([[-100, 1, 2, 3], [-100, -100, -100, 4]])
    rows = logits.double().log_softmax(-1)
    first = -(rows[0, 0, 1] + rows[0, 1, 2] + rows[0, 2, 3]) / 3
    expected = (first - rows[1, 2, 4]) / 2
    assert mean_per_sequence(logits, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_curves_are_compared_at_every_step() -> None:
    assert apart([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError):
        apart([1.0], [1.0, 2.0])


def test_our_losses_are_those_of_the_batches_that_are_handed_over() -> None:
    cli = full_fine_tuning.full_fine_tuning.CLIConfig(max_steps=2, save=False)
    losses, held_out = asyncio.run(full_fine_tuning.ours(cli))
    assert len(losses) == 2 and losses[1] < losses[0] and held_out < losses[0]


def test_without_trl_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"trl: not installed \(pip install trl\)"):
        asyncio.run(full_fine_tuning.measure(FullConfig()))
