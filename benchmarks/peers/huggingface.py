"""transformers: `generate` on a padded batch, and continuous batching, each with and without a PEFT adapter."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from benchmarks.harness import Contender
from benchmarks.models import PAD_ID
from benchmarks.peers.setup import Setup

_PAGE_TOKENS = 64


def load_model(setup: Setup) -> Any:
    """The base model as transformers loads it, with scaled-dot-product attention."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, setup.config.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(setup.config.device).eval()


def sharing_weights(model: Any) -> Any:
    """A second module tree over the same weights, so that PEFT's changes to it do not affect the first."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def with_adapter(model: Any, setup: Setup) -> Any:
    """The model with the adapter, unmerged, in the model's dtype."""
    peft: Any = importlib.import_module("peft")
    assert setup.adapter is not None
    adapted = peft.PeftModel.from_pretrained(sharing_weights(model), str(setup.adapter))
    return adapted.to(getattr(torch, setup.config.dtype)).eval()


def build_generate(setup: Setup) -> list[Contender]:
    """`generate` on the left-padded batch of all rows, with scores converted to logprobs."""
    base = load_model(setup)
    adapted = with_adapter(base, setup)
    return [
        Contender("HF generate, LoRA", lambda seed: _generate(adapted, setup, seed)),
        Contender("HF generate, base", lambda seed: _generate(base, setup, seed)),
    ]


@torch.inference_mode()
def _generate(model: Any, setup: Setup, seed: int) -> int:
    workload = setup.workload.in_round(seed)
    rows = [prompt for prompt in workload.prompts_P for _ in range(workload.group_size)]
    longest = max(map(len, rows))
    device = setup.config.device
    ids = torch.tensor([[PAD_ID] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    options = _options(setup, return_dict_in_generate=True, output_scores=True)
    torch.manual_seed(seed)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=options)
    logprobs = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    new = output.sequences[:, longest:]
    assert logprobs.shape == new.shape
    ended = torch.isin(new, torch.tensor(setup.workload.stops, device=device))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
    return int(lengths.sum())


def build_continuous(setup: Setup) -> list[Contender]:
    """`generate_batch`: paged cache, prompts shared by the samples of a group, logprobs of the sampled tokens."""
    base = load_model(setup)
    adapted = with_adapter(base, setup).get_base_model()  # its linears are PEFT's, with the adapter active
    return [
        Contender("HF continuous batching, LoRA", lambda seed: _generate_batch(adapted, setup, seed)),
        Contender("HF continuous batching, base", lambda seed: _generate_batch(base, setup, seed)),
    ]


def _generate_batch(model: Any, setup: Setup, seed: int) -> int:
    generation: Any = importlib.import_module("transformers.generation")
    workload = setup.workload.in_round(seed)
    longest = max(map(len, workload.prompts_P)) + workload.max_new_tokens
    batching = generation.ContinuousBatchingConfig(
        return_logprobs=True,
        seed=seed,
        max_batch_tokens=2048,
        page_size=_PAGE_TOKENS,
        num_blocks=workload.rows * (longest // _PAGE_TOKENS + 2),
    )
    outputs = model.generate_batch(
        workload.prompts_P,
        generation_config=_options(setup, num_return_sequences=workload.group_size),
        continuous_batching_config=batching,
    )
    completions = [output.generated_tokens for output in outputs.values()]
    if len(completions) != workload.rows:  # it logs errors and returns the completed ones
        raise RuntimeError(f"generate_batch returned {len(completions)} of {workload.rows} completions")
    return sum(map(len, completions))


def _options(setup: Setup, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=setup.workload.max_new_tokens,
        eos_token_id=setup.workload.stops,
        pad_token_id=PAD_ID,
        **more,
    )
