"""The frozen base model: transformers' own module tree with our attention and LoRA linears plugged in.

Knows how to turn packed tokens into hidden states and hidden states into logits, for any mixture of adapters. It holds no
state of sequences or training; those are generation.py and trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tinker_local_backend.engine.attention import ATTENTION_NAME, DecodePlan, PackedPlan
from tinker_local_backend.engine.kv_cache import KVCache
from tinker_local_backend.engine.lora import Adapter, AdapterRouting, LoraSpec, install_lora, new_adapter
from tinker_local_backend.errors import ModelLoadError

_REFUSED_CONFIG = {
    "final_logit_softcapping": "soft-capped logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "num_local_experts": "mixture-of-experts layers",
    "num_experts": "mixture-of-experts layers",
    "n_routed_experts": "mixture-of-experts layers",
}


def default_device() -> torch.device:
    """CUDA when torch sees one, else the CPU; TINKER_LOCAL_DEVICE overrides."""
    return torch.device(os.environ.get("TINKER_LOCAL_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_model_name(name: str) -> None:
    """Raise ModelLoadError for a path that is not a model directory, before anything is loaded."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith((".", "/", "~")) or path.exists() or name.count("/") != 1
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"model {name!r}: no config.json there. Give a directory that transformers can load, or a Hugging Face id "
            "such as Qwen/Qwen3-4B-Instruct-2507"
        )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar for models that load in a blink; the bar comes back for downloads and for others."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


class BaseModel:
    """A causal language model on one device, shared by every adapter and snapshot of an engine.

    Args:
        name: directory or Hugging Face id.
        device: None means CUDA when available, else CPU.
        dtype: None means bfloat16 on CUDA and float32 on CPU.

    Raises:
        ModelLoadError: no such model, or an architecture that the engine does not support.
    """

    def __init__(self, name: str, device: torch.device | None = None, dtype: torch.dtype | None = None):
        check_model_name(name)
        self.name = name
        self.device = device or default_device()
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        try:
            self.config = AutoConfig.from_pretrained(name).get_text_config()
            self._refuse_unsupported()
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
            with _quiet_loading():
                model: Any = AutoModelForCausalLM.from_pretrained(
                    name, dtype=self.dtype, attn_implementation=ATTENTION_NAME
                )
        except OSError as error:
            raise ModelLoadError(f"model {name!r} cannot be loaded: {error}") from error
        self._model: nn.Module = model.to(self.device).eval().requires_grad_(False)
        self._routing = AdapterRouting()
        self.linears = install_lora(self._model, self._routing)
        self._body: nn.Module = model.base_model
        self._head: nn.Module = model.get_output_embeddings()
        self.vocab_size: int = self._head.weight.shape[0]  # pyright: ignore
        self.context_length: int = self._context_length()
        self._check_packing()

    def _refuse_unsupported(self) -> None:
        for key, what in _REFUSED_CONFIG.items():
            if getattr(self.config, key, None) not in (None, 0, 1, 1.0):
                raise ModelLoadError(
                    f"model {self.name!r} ({self.config.model_type}) has {what} (config.{key}), which the local engine "
                    "does not support; use a dense Llama- or Qwen-like model, or backend=tinker"
                )
        if not isinstance(getattr(self.config, "max_position_embeddings", None), int):
            raise ModelLoadError(f"model {self.name!r} ({self.config.model_type}) states no max_position_embeddings")
        kinds = set(getattr(self.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ModelLoadError(
                f"model {self.name!r} ({self.config.model_type}) has layers of type {', '.join(sorted(kinds))}, which the local "
                "engine does not support; use a model with attention in every layer, or backend=tinker"
            )

    def _context_length(self) -> int:
        """Longest sequence: the positions that the model knows, and no more than a sliding window, which is not implemented."""
        limits = [self.config.max_position_embeddings]
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if (
            window
            and (kinds is None or "sliding_attention" in kinds)
            and getattr(self.config, "use_sliding_window", True)
        ):
            limits.append(window)
        return min(limits)

    @torch.inference_mode()
    def _check_packing(self) -> None:
        """Two sequences packed must give what each gives alone; a layer that mixes neighbours (convolution, state) fails here."""
        first, second = [torch.arange(n, device=self.device) % self.vocab_size for n in (5, 3)]
        alone = [
            self.hidden_states(
                tokens, torch.arange(len(tokens), device=self.device), PackedPlan([0, len(tokens)]), None
            )
            for tokens in (first, second)
        ]
        positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))]).to(self.device)
        bounds = [0, len(first), len(first) + len(second)]
        packed = self.hidden_states(torch.cat([first, second]), positions, PackedPlan(bounds), None)
        expected = torch.cat(alone).float()
        error = float((packed.float() - expected).norm() / expected.norm().clamp(min=1e-12))
        if not error <= (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise ModelLoadError(
                f"model {self.name!r} ({self.config.model_type}) does not keep packed sequences apart (relative error "
                f"{error:.1e}): it has layers that the local engine does not support"
            )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a turn when a request names no stop: the model's own end-of-sequence ids."""
        generation = getattr(self._model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = self.config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    def new_adapter(self, spec: LoraSpec, seed: int) -> Adapter:
        return new_adapter(spec, self.linears, seed, self.device)

    def new_cache(self, budget_tokens: int) -> KVCache:
        kv_heads, head_dim = self._kv_shape()
        return KVCache(self.config.num_hidden_layers, kv_heads, head_dim, self.dtype, self.device, budget_tokens)

    def _kv_shape(self) -> tuple[int, int]:
        """Key heads and their dimension."""
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return kv_heads, getattr(self.config, "head_dim", None) or self.config.hidden_size // heads

    def kv_bytes_per_token(self) -> int:
        kv_heads, head_dim = self._kv_shape()
        return 2 * self.config.num_hidden_layers * kv_heads * head_dim * torch.finfo(self.dtype).bits // 8

    def hidden_states(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: PackedPlan | DecodePlan,
        adapters: Adapter | Sequence[Adapter | None] | None,
    ) -> torch.Tensor:
        """Final hidden states (T, hidden) of T packed tokens. `adapters`: one for all rows, or one per token."""
        with self._route(adapters):
            output = self._body(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, plan=plan)
        return output.last_hidden_state[0]

    def logits(self, hidden_N: torch.Tensor, adapters: Adapter | Sequence[Adapter | None] | None) -> torch.Tensor:
        """Logits (N, vocabulary) in float32 of N hidden states, through the head and its adapters."""
        with self._route(adapters):
            return self._head(hidden_N[None])[0].float()

    def _route(self, adapters: Adapter | Sequence[Adapter | None] | None):
        if adapters is None or isinstance(adapters, Adapter):
            return self._routing.use_one(adapters)
        return self._routing.use(adapters)
