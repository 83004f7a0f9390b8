"""Models with random weights: speed and memory depend on the shape of a model, not on what it has learnt.

The tokenizer is a table of words, `w3 w4 w5 ...`, so text and token ids convert into each other exactly, and a peer that
requires text gets the same tokens as the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
FIRST_WORD_ID = 3
"""Ids below are special; every id from here on is an ordinary word."""


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of layers with the gated delta rule (Qwen3.5)."""

    values: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Experts:
    """Routed experts instead of the MLP (Qwen3-MoE), and the number of experts per token."""

    number: int
    chosen: int
    inner: int


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with grouped-query attention, a gated MLP and a tied head, which determine its cost."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    stored_dtype: str = "float32"
    max_positions: int = 32768
    delta: DeltaHeads | None = None
    """three of four layers have the gated delta rule, and the fourth gated attention"""
    experts: Experts | None = None
    """if set, no layer uses `mlp`"""

    @property
    def attention_layers(self) -> int:
        return self.layers // 4 if self.delta else self.layers

    @property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(in, out) of the linears of all layers that a token passes through; these have adapters."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, 2 * q if self.delta else q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden)]
        inner, count = (self.mlp, 1) if self.experts is None else (self.experts.inner, self.experts.chosen)
        mlp = count * [(self.hidden, inner), (self.hidden, inner), (inner, self.hidden)]
        shapes = self.attention_layers * attention + self.layers * mlp
        if self.delta is not None:
            values, keys = self.delta.values * self.delta.dim, self.delta.keys * self.delta.dim
            inputs = [(self.hidden, out) for out in (2 * keys + values, values, self.delta.values, self.delta.values)]
            shapes += (self.layers - self.attention_layers) * [*inputs, (values, self.hidden)]
        return shapes

    @property
    def body_parameters(self) -> int:
        """Weights of all linears except the head."""
        return sum(a * b for a, b in self.linear_shapes)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Weights that every token is multiplied by: the linears and the head."""
        return self.body_parameters + self.head_parameters

    def adapter_parameters(self, rank: int) -> int:
        return sum(rank * (a + b) for a, b in self.linear_shapes)

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * bytes_per_number


SHAPES = {
    "tiny": Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=192, vocab=512),
    "small": Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp=1536, vocab=8192),
    "small-hybrid": Shape(512, 8, 8, 4, 64, 1536, 8192, delta=DeltaHeads(values=8, keys=4, dim=64)),
    "small-moe": Shape(512, 8, 8, 4, 64, 1536, 8192, experts=Experts(number=32, chosen=4, inner=384)),
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, stored_dtype="bfloat16"),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, 151936, stored_dtype="bfloat16"),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, stored_dtype="bfloat16"),
}


def with_vocabulary(shape: Shape, vocab: int) -> Shape:
    return replace(shape, vocab=vocab)


def ensure_model(name: str, shape: Shape, models_dir: str) -> Path:
    """The folder of the model of this shape, which is made on first use, whole or not at all."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:8]
    root = Path(models_dir).expanduser()
    target = root / f"{name}-{digest}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    try:
        _write_model(shape, staging)
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def model_config(shape: Shape) -> Qwen3Config | Qwen3_5TextConfig | Qwen3MoeConfig:
    """The config of a Qwen3, Qwen3.5 or Qwen3-MoE of this shape, with the special tokens of `word_tokenizer`."""
    fields: dict[str, Any] = dict(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    if shape.experts is not None:
        experts: dict[str, Any] = {"num_experts": shape.experts.number, "num_experts_per_tok": shape.experts.chosen}
        return Qwen3MoeConfig(**fields, **experts, moe_intermediate_size=shape.experts.inner, norm_topk_prob=True)
    if shape.delta is None:
        return Qwen3Config(**fields)
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.layers)]
    return Qwen3_5TextConfig(
        **fields,
        layer_types=kinds,
        linear_num_value_heads=shape.delta.values,
        linear_num_key_heads=shape.delta.keys,
        linear_key_head_dim=shape.delta.dim,
        linear_value_head_dim=shape.delta.dim,
    )


def _write_model(shape: Shape, folder: Path) -> None:
    config = model_config(shape)
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.stored_dtype))
    model.save_pretrained(folder)
    word_tokenizer(shape.vocab).save_pretrained(folder)


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word per id: `w3` is token 3. Words are separated by spaces."""
    table = {"<pad>": PAD_ID, "<eos>": EOS_ID, "<unk>": UNKNOWN_ID}
    table |= {f"w{i}": i for i in range(FIRST_WORD_ID, vocab)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def words(tokens: list[int]) -> str:
    """The text that the tokenizer encodes as exactly these ids."""
    return " ".join(f"w{token}" for token in tokens)
