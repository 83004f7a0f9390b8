"""The bonus for entropy is an unbiased estimate of its gradient, and an adaptive coefficient moves towards the target."""

import asyncio
import json

import numpy as np
import pytest
import torch

from tests.rl.handmade import DATA, array
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.data_processing import replace_inputs
from tinker_cookbook.rl.entropy import EntropyBonus, EntropyConfig, entropy_advantages


def test_its_expectation_is_the_gradient_of_the_entropy() -> None:
    """Over all tokens of a small vocabulary, in float64: sum of p(a) A(a) d log p(a) is coef * dH. With the sign turned it
    is the opposite.
    """
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, -0.4], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, dim=0)
    (wanted,) = torch.autograd.grad(-(logprobs.exp() * logprobs).sum(), logits, retain_graph=True)
    assert float(wanted.abs().max()) > 0.1
    for mean in (0.0, 1.7):
        advantages = entropy_advantages(-logprobs.detach().numpy(), np.ones(5), mean, coef=0.25)
        weights = logprobs.detach().exp() * torch.from_numpy(advantages)
        (found,) = torch.autograd.grad((weights * logprobs).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, 0.25 * wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("coef", [0.5, 1.0])
def test_rare_tokens_gain_and_frequent_ones_lose(coef: float) -> None:
    """DATA has the tokens 10 and 11, and 12 to 14, each with advantage 2; the bonus has mean 0 over the batch."""
    changed, metrics, _ = asyncio.run(EntropyBonus(EntropyConfig(coef=coef))(list(DATA), [], []))
    surprisal = np.concatenate([-array(datum, "logprobs")[array(datum, "mask") > 0] for datum in DATA])
    added = np.concatenate([array(datum, "advantages")[array(datum, "mask") > 0] - 2.0 for datum in changed])
    assert np.ptp(surprisal) > 0
    assert added == pytest.approx(coef * (surprisal - surprisal.mean()), abs=1e-6)
    assert metrics == {"optim/entropy_coef": coef}
    assert all((array(datum, "advantages")[array(datum, "mask") == 0] == 0).all() for datum in changed)
    assert all((array(datum, "advantages")[array(datum, "mask") > 0] == 2).all() for datum in DATA)  # copies


class TestAdaptive:
    def step(self, bonus: EntropyBonus) -> float:
        _, metrics, _ = asyncio.run(bonus(list(DATA), [], []))
        bonus.end_step()
        return metrics["optim/entropy_coef"]

    def entropy(self) -> float:
        return float(np.concatenate([-array(datum, "logprobs")[array(datum, "mask") > 0] for datum in DATA]).mean())

    def test_below_the_target_it_grows_up_to_its_bound(self) -> None:
        bonus = EntropyBonus(EntropyConfig(target=self.entropy() + 0.1, delta=0.25, max_coef=0.6))
        assert [self.step(bonus) for _ in range(4)] == [0.0, 0.25, 0.5, 0.6]
        assert bonus.entropy == pytest.approx(self.entropy())

    def test_above_the_target_it_shrinks_and_does_not_count(self) -> None:
        bonus = EntropyBonus(EntropyConfig(coef=0.6, target=self.entropy() - 0.1, delta=0.25))
        assert [self.step(bonus) for _ in range(4)] == [0.6, 0.0, 0.0, 0.0]
        assert bonus.coef == 0.0

    def test_it_goes_on_from_its_state(self) -> None:
        config = EntropyConfig(target=self.entropy() + 0.1, delta=0.25)
        bonus = EntropyBonus(config)
        self.step(bonus)
        resumed = EntropyBonus(config, json.loads(json.dumps(bonus.state)))
        assert [self.step(resumed), self.step(resumed)] == [self.step(bonus), self.step(bonus)] == [0.25, 0.5]

    def test_all_minibatches_of_a_step_count_and_none_of_the_steps_before(self) -> None:
        """The entropy of a step is over the tokens of both datums, whether they come together or one by one."""
        config = EntropyConfig(coef=0.5, target=self.entropy() - 0.1, delta=0.125)
        together, apart = EntropyBonus(config), EntropyBonus(config)
        for _ in range(2):
            self.step(together)
            for datum in DATA:
                asyncio.run(apart([datum], [], []))
            apart.end_step()
            assert apart.entropy == pytest.approx(together.entropy) == pytest.approx(self.entropy())
        apart.end_step()  # nothing was sampled since
        assert apart.coef == together.coef == 0.25

    def test_at_the_target_it_counts_and_grows(self) -> None:
        once = EntropyBonus(EntropyConfig(coef=0.5))
        self.step(once)
        bonus = EntropyBonus(EntropyConfig(coef=0.5, target=once.entropy))
        assert [self.step(bonus) for _ in range(3)] == pytest.approx([0.5, 0.505, 0.51])
        assert once.coef == 0.5  # without a target it stays

    def test_of_no_sampled_token_there_is_no_mean(self) -> None:
        blank = [replace_inputs(datum, mask=np.zeros(len(array(datum, "mask")), np.float32)) for datum in DATA]
        bonus = EntropyBonus(EntropyConfig(coef=0.5))
        changed, metrics, _ = asyncio.run(bonus(blank, [], []))
        assert changed is blank and metrics == {"optim/entropy_coef": 0.5}
        bonus.end_step()
        assert bonus.state == {"coef": 0.5, "entropy": None}

    def test_a_step_without_tokens_moves_nothing(self) -> None:
        bonus = EntropyBonus(EntropyConfig(coef=0.5, target=1.0))
        bonus.end_step()
        assert bonus.state == {"coef": 0.5, "entropy": None}


def test_settings_are_checked() -> None:
    for config, message in (
        ({}, "entropy.coef=0 without entropy.target does nothing"),
        ({"target": 0.0}, "entropy.target=0.0: must be positive"),
        ({"coef": 2.0}, "entropy.coef=2.0 is above entropy.max_coef=1.0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            EntropyConfig(**config)
    assert EntropyConfig(coef=1.0).max_coef == 1.0  # at the bound
    assert EntropyConfig(coef=0.0, target=0.5).delta == 0.005
