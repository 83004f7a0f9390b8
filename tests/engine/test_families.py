"""Every supported family computes what transformers computes: packed, sampled token by token, and in the backward pass.

The reference runs each sequence by itself through transformers' eager attention, adapters merged into its weights. Windows
are shorter than the sequences and soft caps are low enough to matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.reference import Reference, loss_and_gradients
from tests.engine.conftest import SHAPE, with_random_biases, write_model
from tests.engine.devices import here
from tests.engine.helpers import (
    assert_close,
    assert_near,
    at_once,
    cross_entropy_datum,
    datum,
    drop_gradients,
    gradients,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tinker_local_backend import ServiceClient, TrainingClient
from tinker_local_backend.engine.model.attention import PackedPlan

WINDOW = 8
RANK = 4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA2 = {
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3 = {
    "query_pre_attn_scalar": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaConfig, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, {"tie_word_embeddings": False}),
    "mistral-window": (MistralConfig, {"tie_word_embeddings": False, "sliding_window": WINDOW}),
    "mistral-whole": (MistralConfig, {"tie_word_embeddings": True, "sliding_window": None}),
    "gemma-tied": (GemmaConfig, {"tie_word_embeddings": True}),
    "gemma2-tied": (Gemma2Config, {"tie_word_embeddings": True, **GEMMA2}),
    "gemma2-untied": (Gemma2Config, {"tie_word_embeddings": False, **GEMMA2}),
    "gemma3-tied": (Gemma3TextConfig, {"tie_word_embeddings": True, **GEMMA3}),
    "gemma3-untied": (Gemma3TextConfig, {"tie_word_embeddings": False, **GEMMA3}),
    "qwen2-moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": (Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "gpt-oss": (GptOssConfig, GPT_OSS),
}

MIXTURES = ("qwen2-moe", "qwen3-moe", "gpt-oss")

ROUTED_ONLY = ("qwen3-moe", "gpt-oss")
"""An adapter on these is on attention and the head; of the third its shared experts have one too."""


def write_family(name: str, folder: Path) -> str:
    """A model with random biases and norms."""
    kind, fields = FAMILIES[name]
    return with_random_biases(write_model(kind(**{**SHAPE, **fields}), folder, 7))


@dataclass
class Family:
    client: TrainingClient
    """with an adapter that is not the identity"""
    reference: Reference
    matrices: int
    """of an adapter"""

    def adapter(self) -> dict[str, torch.Tensor]:
        return self.reference.adapter_of(self.client)


SLOW = ("qwen3-moe",)
"""What is in it is in the others."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES],
)
def family(
    request: pytest.FixtureRequest, service: ServiceClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    if request.param in MIXTURES and here().dtype != torch.float32:
        pytest.skip("in 16 bits a token between two experts may go to another one than in float64")
    path = write_family(request.param, tmp_path_factory.mktemp("family"))
    train_mlp = request.param not in ROUTED_ONLY
    routed = 3 if "moe" in request.param else 0  # gate, up and down of all experts together
    matrices = 2 * (((7 + routed) if train_mlp else 4) * SHAPE["num_hidden_layers"] + 1)
    yield Family(make_training_client(service, path, RANK, train_mlp=train_mlp), Reference(path), matrices)


def test_packed_sequences_get_the_logits_that_each_has_alone(family: Family) -> None:
    sequences = [random_tokens(n, n) for n in (1, 23, WINDOW, 40, WINDOW + 1, 3)]
    lengths = [len(tokens) for tokens in sequences]
    run = family.client._run
    positions = torch.cat([torch.arange(n) for n in lengths]).to(run.model.device)
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=run.model.device)
    for adapter, own in ((None, None), (run.state.adapter, family.adapter())):
        with torch.no_grad():
            hidden = run.model.hidden_states(tokens, positions, PackedPlan.whole(lengths), adapter)
            found = run.model.logits(hidden, adapter).split(lengths)
            for sequence, logits in zip(sequences, found, strict=True):
                expected = family.reference.logits(sequence, own, 32 / RANK).numpy()
                assert expected.std() > 0.3
                assert_near(logits.cpu(), expected, atol=3e-5)


def test_sampled_logprobs_are_those_of_the_reference_while_the_window_slides(family: Family) -> None:
    """One batch: prompts longer and shorter than the window, one that begins like another, rows that leave early."""
    long = random_tokens(30, 1)
    requests = [(long, 2, 3 * WINDOW), (long[:14] + random_tokens(9, 2), 2, 5), (random_tokens(4, 3), 3, 2 * WINDOW)]
    sampler = family.client.save_weights_and_get_sampling_client().result()
    responses = at_once(
        lambda: [sampler.sample(prompt(tokens), n, params(longest, stop=[], seed=n)) for tokens, n, longest in requests]
    )
    adapter, scale = family.adapter(), 32 / RANK
    for (tokens, samples, longest), response in zip(requests, responses, strict=True):
        assert len(response.sequences) == samples
        assert len({tuple(sequence.tokens) for sequence in response.sequences}) == samples
        for sequence in response.sequences:
            assert len(sequence.tokens) == longest
            expected = family.reference.completion_logprobs(tokens, sequence.tokens, adapter, scale)
            assert_near(sequence.logprobs, expected, atol=3e-5)
    # The next turns of two conversations go on from the keys that the first ones left in the cache.
    turns = [[*requests[i][0], *responses[i].sequences[0].tokens, *random_tokens(5, 4)] for i in (0, 2)]
    responses = at_once(lambda: [sampler.sample(prompt(turn), 1, params(WINDOW, stop=[])) for turn in turns])
    for turn, response in zip(turns, responses, strict=True):
        (sequence,) = response.sequences
        expected = family.reference.completion_logprobs(turn, sequence.tokens, adapter, scale)
        assert_near(sequence.logprobs, expected, atol=3e-5)


def test_gradients_are_those_of_the_reference(family: Family) -> None:
    """Two of the sequences share a prefix that is longer than the window."""
    shared = random_tokens(2 * WINDOW, 5)
    data = [cross_entropy_datum(n, n) for n in (1, 19, 40)]
    for seed, tail in ((1, 7), (2, 21)):
        plain = cross_entropy_datum(len(shared) + tail, seed)
        inputs = {key: value.to_numpy() for key, value in plain.loss_fn_inputs.items()}
        data.append(datum([*shared, *plain.model_input.to_ints()[:tail]], **inputs))
    output = family.client.forward_backward(data, "cross_entropy").result()
    at = None if here().is_reference else [found["logprobs"].to_numpy() for found in output.loss_fn_outputs]
    loss, logprobs, expected = loss_and_gradients(family.reference, family.client, data, "cross_entropy", at=at)
    found = gradients(family.client)
    drop_gradients(family.client)
    assert output.metrics["computed_tokens:sum"] == output.metrics["tokens:sum"] - len(shared)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-4)
    for ours, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs, atol=3e-5)
    assert len(found) == family.matrices
    assert all(np.abs(matrix).max() > 0 for matrix in expected.values())
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2-window", "mistral-window", "gemma2-tied", "gemma3-tied"])
def test_windows_and_caps_of_these_models_matter(name: str, tmp_path: Path) -> None:
    """Guards the tests above: without its window or its caps such a model computes something else."""
    path = write_family(name, tmp_path)
    changes = [{"sliding_window": 128}]
    if name.startswith("gemma2"):
        changes += [{"attn_logit_softcapping": 50.0}, {"final_logit_softcapping": 50.0}]
    tokens = random_tokens(40, 3)
    right = Reference(path).logits(tokens)
    for change in changes:
        config = AutoConfig.from_pretrained(path, **change)
        wrong = AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager")
        with torch.no_grad():
            assert (wrong(torch.tensor([tokens])).logits[0] - right).abs().max() > 0.1
