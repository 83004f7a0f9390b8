"""What fits on which GPU for a model, by the engine's own memory plan. Reads no weights, and needs no GPU.

    python -m tinker_local_backend.plan model=qwen3-4b gpu_gib=24,48,80,141 rank=32

`--help` explains the columns. For a model that does not fit, the table shows how much memory is missing.

All layers are assumed to have full attention with the same KV width: models with latent attention or states need less cache.
TINKER_LOCAL_KV_CACHE_TOKENS and TINKER_LOCAL_ACTIVATION_MB change the shares of the engine, not of this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import chz
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tinker_local_backend.command import parse, run
from tinker_local_backend.engine.model.footprint import Footprint, footprint
from tinker_local_backend.engine.model.loading import model_config
from tinker_local_backend.engine.model.memory_plan import RANK, USABLE, MemoryPlan, of_card, vllm_cache_tokens
from tinker_local_backend.engine.model.refusals import refuse_unsupported
from tinker_local_backend.errors import ModelLoadError

GIB = 1 << 30
CONTEXTS = (1024, 4096, 16384)


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.plan`: what fits on which GPU for a model, by the engine's memory plan.

    KV cache: capacity of the sampler in tokens. rows at N: sequences of N tokens that fit into it. tokens in a pass: packed
    tokens per training pass; "recomputed": the backward pass runs layers again, because fewer than 2,048 tokens fit otherwise.
    longest datum: tokens, with recomputation. With vllm_share vLLM samples, and the engine's cache only scores prompts.
    Shares: adapter (in training, with gradient and moments), snapshots (sampled from), slots (adapters in captured decode steps),
    graphs (those steps), logits (buffers), activations (of a training pass).
    """

    model: str = chz.field(
        doc="directory, hub id, or the short name of a released model whose shapes the library knows, such as qwen3-4b"
    )
    gpu_gib: tuple[float, ...] = chz.field(default=(24.0, 48.0, 80.0, 141.0), doc="nominal memory of each card")
    rank: int = chz.field(default=RANK, doc="rank of the adapter in training", validator=chz.validators.gt(0))
    dtype: Literal["bfloat16", "float32"] = chz.field(default="bfloat16", doc="dtype of the weights")
    quantization: Literal["none", "nf4", "int8", "fp8"] = chz.field(
        default="none", doc="value of TINKER_LOCAL_QUANTIZATION"
    )

    vllm_share: float = chz.field(
        default=0.0,
        doc="share of each card for a vLLM that samples (TINKER_LOCAL_VLLM_GPU_MEMORY_UTILIZATION); 0: the engine samples",
    )
    vllm_sleeps: bool = chz.field(
        default=False, doc="vLLM frees its share while the engine trains (TINKER_LOCAL_VLLM_SLEEP)"
    )

    @chz.validate
    def _vllm_has_a_share(self) -> None:
        if not 0 <= self.vllm_share < 1:
            raise ValueError(f"vllm_share must be a share of a card below 1, got {self.vllm_share}")
        if self.vllm_sleeps and not self.vllm_share:
            raise ValueError("vllm_sleeps=True without vllm_share: say which share of a card vLLM has")

    @chz.validate
    def _cards_have_memory(self) -> None:
        if not self.gpu_gib or min(self.gpu_gib) <= 0:
            raise ValueError(f"gpu_gib must be numbers above 0, got {','.join(map(str, self.gpu_gib))}")


def config_of(name: str) -> Any:
    """The config of a directory, of a released model by its name with or without the organisation, or of another hub id.

    Raises ModelLoadError for an unknown name.
    """
    from tinker_cookbook.models.shapes import known_names, shapes_of

    if not Path(name).expanduser().exists():
        by_name = {known.rpartition("/")[2].lower(): known for known in known_names()}
        shapes = shapes_of(by_name.get(name.lower(), name))
        if shapes is not None:
            return AutoConfig.for_model(**shapes)
        if "/" not in name:
            near = difflib.get_close_matches(name.lower(), by_name, 4, cutoff=0.3)
            raise ModelLoadError(
                f"model={name!r} is not a directory, a hub id such as Qwen/Qwen3-4B, or the name of a known released model; some "
                f"known names are {', '.join(near or sorted(by_name)[-4:])}"
            )
    return model_config(name)


def size_of(name: str, rank: int, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> Footprint:
    """Memory that the model takes on a GPU. Raises ModelLoadError if it is unknown, or not supported by the engine."""
    config = config_of(name)
    refuse_unsupported(name, config.get_text_config())
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=dtype)
    return footprint(module, quantization, rank)


def rows_of(plans: dict[float, MemoryPlan]) -> list[list[str]]:
    """The table: what fits on each card."""
    rows = [["GiB", "KV cache", *(f"rows at {n:,}" for n in CONTEXTS), "tokens in a pass", "longest datum"]]
    for gib, plan in plans.items():
        if plan.missing:
            rows.append([f"{gib:g}", f"training does not fit: {plan.missing / GIB:.1f} GiB are missing"])
            continue
        packed = f"{plan.pass_tokens:,}{' recomputed' if plan.recomputes else ''}"
        held = [f"{plan.rows(context):,}" for context in CONTEXTS]
        rows.append([f"{gib:g}", f"{plan.kv_tokens:,}", *held, packed, f"{plan.longest_tokens:,}"])
    return rows


def shares_of(plans: dict[float, MemoryPlan]) -> list[list[str]]:
    """The table: GiB of each share of a card."""
    rows = [["GiB", "weights", "adapter", "snapshots", "slots", "graphs", "logits", "KV cache", "activations"]]
    for gib, plan in plans.items():
        shares = (plan.size.weights, plan.adapter, plan.snapshots, plan.slots, plan.graphs, plan.logits, plan.cache)
        rows.append([f"{gib:g}", *(f"{share / GIB:.1f}" for share in (*shares, plan.activations))])
    return rows


def vllm_rows_of(cards: Sequence[float], size: Footprint, share: float) -> list[list[str]]:
    """The table: what fits into vLLM's share of each card."""
    rows = [["GiB", "vLLM's share", "its cache, at most", *(f"rows at {n:,}" for n in CONTEXTS)]]
    for gib in cards:
        tokens, taken = vllm_cache_tokens(gib, size, share), share * gib * USABLE
        if tokens <= 0:
            missing = -tokens * size.kv_token / GIB
            rows.append([f"{gib:g}", f"vLLM does not start in {taken:.1f} GiB: {missing:.1f} GiB are missing"])
            continue
        rows.append([f"{gib:g}", f"{taken:.1f} GiB", f"{tokens:,}", *(f"{tokens // n:,}" for n in CONTEXTS)])
    return rows


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows as text. In a row with fewer cells than the first, the last cell may be wide."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in whole]
    of_whole = dict(zip(map(id, whole), lines, strict=True))
    return "\n".join(of_whole.get(id(row), "  ".join([row[0].rjust(widths[0]), *row[1:]])) for row in rows)


def main(config: Config) -> None:
    quantization = None if config.quantization == "none" else config.quantization
    size = size_of(config.model, config.rank, getattr(torch, config.dtype), quantization)
    plans = {gib: of_card(gib, size, config.vllm_share, config.vllm_sleeps) for gib in config.gpu_gib}
    weights = config.dtype if quantization is None else quantization
    print(f"{config.model}: {size.weights / GIB:.1f} GiB of weights ({weights}), an adapter of rank {config.rank}\n")
    print(f"{in_columns(rows_of(plans))}\n\nGiB of each share:\n\n{in_columns(shares_of(plans))}")
    if config.vllm_share:
        print(f"\nSampling with vLLM:\n\n{in_columns(vllm_rows_of(config.gpu_gib, size, config.vllm_share))}")


if __name__ == "__main__":
    run(main, parse(Config))
