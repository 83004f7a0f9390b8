"""Starts a vLLM worker whose routed experts are computed in plain torch, from the buffers that vLLM has filled from an adapter.

    python -P plain_experts.py -P vllm_worker.py

On a CPU vLLM loads adapters on routed experts, but its only kernel for them is Triton's. Everything else is vLLM's here: which
names it reads, how it reshapes and scales them, which slot a row uses.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

import torch


def apply(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> None:
    """In the place of TritonExperts.apply, token by token."""
    names = ("w1", "w2", "topk_weights", "topk_ids", "activation")
    given = {**dict(zip(names, arguments, strict=False)), **named}
    w1, w2, weights, chosen, activation = (given[name] for name in names)
    context = self._lora_context
    slots = context.punica_wrapper.token_lora_indices
    is_interleaved = activation.name == "SWIGLUOAI"
    for row, x in enumerate(hidden_states):
        slot, total = int(slots[row]), torch.zeros_like(output[row])
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            inner = w1[expert] @ x
            if self.w1_bias is not None:
                inner = inner + self.w1_bias[expert]
            if slot >= 0:
                count = context.w13_num_slices
                half = len(inner) // 2
                parts = [slice(0, None)] if count == 1 else [slice(0, half), slice(half, None)]
                if count == 2 and is_interleaved:
                    parts = [slice(0, None, 2), slice(1, None, 2)]
                tables = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, parts, strict=True)
                for a, b, columns in tables:
                    inner[columns] += of_expert(b, slot, expert) @ (of_expert(a, slot, expert) @ x)
            gated = oai(inner) if is_interleaved else silu(inner)
            outer = w2[expert] @ gated
            if self.w2_bias is not None:
                outer = outer + self.w2_bias[expert]
            if slot >= 0:
                (a,), (b,) = context.w2_lora_a_stacked, context.w2_lora_b_stacked
                outer += of_expert(b, slot, expert) @ (of_expert(a, slot, expert) @ gated)
            total += weight * outer
        output[row] = total


def of_expert(stacked: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
    """One matrix of (slots, experts or 1, ...)."""
    return stacked[slot, expert if stacked.shape[1] > 1 else 0]


def silu(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2)
    return torch.nn.functional.silu(gate) * up


def oai(inner: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    gate, up = inner[::2].clamp(max=limit), inner[1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM's prints go to the log
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    module.TritonExperts.apply = apply
    os.dup2(answers, 1)
    os.close(answers)
    script = sys.argv[-1]
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
