"""A custom loss in the loop: the same step as the built-in of the same formula, and errors that name what is wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tinker
import torch

from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.algorithms import check_loss, custom_loss, register_loss, sum_over_datums
from tinker_cookbook.rl.minibatch import train_step

TINY = str(EXAMPLE_DATA / "tiny_chat")


def importance_sampling(logprobs, sampling_logprobs, advantages, mask):
    ratio = ((logprobs - sampling_logprobs) * mask).exp()
    return -(ratio * advantages * mask).sum()


def ppo(logprobs, sampling_logprobs, advantages, mask):
    ratio = ((logprobs - sampling_logprobs) * mask).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(objective * mask).sum(), {"mean_ratio": ratio.mean()}


def make_datum(seed: int, prompt: int = 3, sampled: int = 5) -> tinker.Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1400, prompt + sampled).tolist()
    is_sampled = np.arange(prompt + sampled - 1) >= prompt - 1
    columns = {
        "logprobs": np.where(is_sampled, -rng.exponential(3.0, len(is_sampled)), 0.0),
        "advantages": np.where(is_sampled, rng.normal(size=len(is_sampled)), 0.0),
        "mask": is_sampled,
    }
    inputs = {key: tinker.TensorData.from_numpy(value.astype(np.float32)) for key, value in columns.items()}
    inputs["target_tokens"] = tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [make_datum(seed, sampled=4 + seed) for seed in range(4)]


async def one_step(loss_fn: str | Callable[..., Any], num_substeps: int) -> tuple[list[torch.Tensor], list, dict]:
    """Logprobs of the step, logprobs after it, and its metrics."""
    service = backends.create_service_client("local")
    client = await service.create_lora_training_client(base_model=TINY, rank=4, seed=3)
    metrics: dict = {}
    seen = await train_step(list(DATA), client, 1e-2, num_substeps, loss_fn, metrics=metrics)
    plain = [
        tinker.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": datum.loss_fn_inputs["mask"],
            },
        )
        for datum in DATA
    ]
    after = await client.forward(plain, "cross_entropy")
    return seen, [outputs["logprobs"].to_numpy() for outputs in after.loss_fn_outputs], metrics


@pytest.mark.parametrize("num_substeps", [1, 2])
@pytest.mark.parametrize(("name", "own"), [("importance_sampling", importance_sampling), ("ppo", ppo)])
def test_the_step_is_that_of_the_built_in(
    name: str, own: Callable[..., Any], num_substeps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path))
    expected_seen, expected_after, expected = asyncio.run(one_step(name, num_substeps))
    seen, after, found = asyncio.run(one_step(own, num_substeps))
    for left, right in zip(seen, expected_seen, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    for left, right in zip(after, expected_after, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)
    assert not np.allclose(after[0], expected_seen[0].numpy(), atol=1e-2), "the step has moved the weights"
    assert found["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-3)
    assert found["train/loss_sum"] == pytest.approx(expected["train/loss_sum"], rel=1e-3)
    assert found["train/num_substeps"] == num_substeps
    if own is ppo:
        assert found["train/mean_ratio"] > 0


def test_losses_are_added_up_and_metrics_averaged() -> None:
    logprobs = [torch.zeros(len(d.loss_fn_inputs["mask"].data), requires_grad=True) for d in DATA]
    loss, metrics = sum_over_datums(lambda lp, q, a, m: (lp.sum() + m.sum(), {"sampled": float(m.sum())}))(
        DATA, logprobs
    )
    assert float(loss.detach()) == 4 + 5 + 6 + 7 and metrics == {"sampled:mean": 22 / 4}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda lp, q, a, m: lp, r"returned Tensor of shape \(7,\); a loss is a scalar tensor: sum it"),
        (lambda lp, q, a, m: 0.5, r"returned float of shape \(\)"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_named(returned: Callable[..., Any], message: str) -> None:
    logprobs = [torch.zeros(len(d.loss_fn_inputs["mask"].data)) for d in DATA]
    with pytest.raises(DataValidationError, match=message):
        sum_over_datums(returned)([DATA[1]], [logprobs[1]])


def test_what_a_config_may_say() -> None:
    assert custom_loss("ppo") is None
    assert custom_loss(ppo) is ppo
    assert custom_loss(f"{__name__}:ppo") is ppo
    check_loss(f"{__name__}:ppo", None, "tinker")
    with pytest.raises(
        ConfigurationError, match=r"(?s)loss_fn='pppo' is unknown; use importance_sampling, ppo.*def loss"
    ):
        check_loss("pppo", None, "local")
    with pytest.raises(
        ConfigurationError, match=r"takes \(a, b\), but will be called with \(logprobs, sampling_logprobs"
    ):
        check_loss(cast(Any, lambda a, b: 0), None, "local")
    with pytest.raises(ConfigurationError, match=r"loss_fn_config=.*is for the built-in losses"):
        check_loss(ppo, {"clip_low_threshold": 0.8}, "local")
    with pytest.raises(ConfigurationError, match="'ppo' is taken"):
        register_loss("ppo", ppo)
