"""Short spellings for what almost every test of the engine does."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tinker
import torch

from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient

VOCABULARY = 1536
"""ids of the random models"""

STEP = tinker.AdamParams(learning_rate=1e-2)


def make_training_client(
    service: ServiceClient,
    model: str,
    rank: int = 4,
    seed: int = 0,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
) -> TrainingClient:
    """A training client whose B matrices are not zero, so that its adapter changes every logit."""
    client = service.create_lora_training_client(model, rank, seed, train_mlp, train_attn, train_unembed).result()
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, matrix in sorted(client._run.state.adapter.b.items()):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.02 if "lm_head" in name else 0.05))
    return client


def random_tokens(length: int, seed: int) -> list[int]:
    """Ids without the special ones at the end of the vocabulary."""
    return np.random.default_rng(seed).integers(0, 1500, length).tolist()


def prompt(tokens: Iterable[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def datum(tokens: Sequence[int], **inputs: object) -> tinker.Datum:
    """A datum from arrays (float ones become float32)."""
    return tinker.Datum(
        model_input=prompt(tokens),
        loss_fn_inputs={
            key: value if isinstance(value, tinker.TensorData) else tinker.TensorData.from_numpy(np.asarray(value))
            for key, value in inputs.items()
        },
    )


def cross_entropy_datum(length: int, seed: int) -> tinker.Datum:
    """Random tokens, random targets, weights of both signs and some zeros."""
    rng = np.random.default_rng(seed)
    weights = np.round(rng.normal(size=length), 1).astype(np.float32)
    return datum(
        rng.integers(0, 1500, length).tolist(), target_tokens=rng.integers(0, VOCABULARY, length), weights=weights
    )


def policy_datum(
    length: int, seed: int, client: TrainingClient | None = None, temperature: float = 1.0
) -> tinker.Datum:
    """Advantages of both signs; sampled logprobs near the client's own, so that ratios lie on both sides of any clip."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 1500, length).tolist(), rng.integers(0, VOCABULARY, length)
    logprobs = np.full(length, -7.0, dtype=np.float32)
    if client is not None:
        scored = datum(tokens, target_tokens=targets, weights=np.zeros(length, dtype=np.float32))
        output = client.forward([scored], "cross_entropy", {"temperature": temperature}).result()
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    return datum(
        tokens,
        target_tokens=targets,
        logprobs=(logprobs + rng.normal(scale=0.4, size=length)).astype(np.float32),
        advantages=np.round(rng.normal(size=length), 1).astype(np.float32),
    )


def gradients(client: TrainingClient) -> dict[str, np.ndarray]:
    """Copies of what forward_backward has accumulated so far, by matrix name."""
    accumulated = client._run.state.gradients
    assert accumulated is not None
    names = [name for name, _ in client._run.state.adapter.named_parameters()]
    return {name: gradient.numpy().copy() for name, gradient in zip(names, accumulated, strict=True)}


def weights(client: TrainingClient) -> dict[str, np.ndarray]:
    """Copies of a client's matrices."""
    return {name: m.detach().numpy().copy() for name, m in client._run.state.adapter.named_parameters()}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """Equal to the last bit."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def assert_close(left: dict[str, np.ndarray], right: dict[str, np.ndarray], rtol: float) -> None:
    """Every matrix within `rtol` of its own largest entry."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_allclose(
            array, right[name], rtol=0, atol=rtol * np.abs(right[name]).max() + 1e-12, err_msg=name
        )


def drop_gradients(client: TrainingClient) -> None:
    client._run.state.gradients = None


def params(max_tokens: int | None = 8, temperature: float = 1.0, **fields) -> tinker.SamplingParams:
    return tinker.SamplingParams(max_tokens=max_tokens, temperature=temperature, **fields)


def tokens_of(client: SamplingClient, tokens: Sequence[int], samples: int = 1, **fields) -> list[list[int]]:
    """Token ids of each sample."""
    return [s.tokens for s in client.sample(prompt(tokens), samples, params(**fields)).result().sequences]


def at_once(submit: Callable[[], Sequence[tinker.APIFuture]]) -> list[Any]:
    """Results of requests that reach the engine in one piece, so that its batches are the same in every run."""

    async def main() -> list[Any]:
        return [await future for future in submit()]

    return asyncio.run(main())
