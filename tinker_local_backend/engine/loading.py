"""A model directory or hub id as transformers' module and tokenizer; and what is refused before any weight is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tinker_local_backend.engine.attention import ATTENTION_NAME
from tinker_local_backend.errors import ModelLoadError

_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""How configs call the number of experts of a layer."""

_INSTEAD = "use a dense Llama- or Qwen-like model, or backend=tinker"

_LOADING = threading.Lock()
"""transformers makes a model under a default device that holds for the whole process: two engines load one after the other."""


def check_model_name(name: str) -> None:
    """Raise ModelLoadError for a path that is not a model directory, before anything is loaded."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith((".", "/", "~")) or path.exists() or name.count("/") != 1
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"model {name!r}: no config.json there. Give a directory that transformers can load, or a Hugging Face id "
            "such as Qwen/Qwen3-4B-Instruct-2507"
        )


def refused(name: str, config: Any, why: str) -> ModelLoadError:
    """The error for a model that the engine does not support."""
    return ModelLoadError(f"model {name!r} ({config.model_type}) {why}; {_INSTEAD}")


def has_experts(config: Any) -> bool:
    """Whether layers of a model with this text config are mixtures of experts."""
    return any((getattr(config, key, None) or 0) > 1 for key in _NUMBERS_OF_EXPERTS)


def refuse_unsupported(name: str, config: Any) -> None:
    """Raise ModelLoadError for a text model's config that names what the engine cannot do. The weights may tell more."""
    if getattr(config, "is_encoder_decoder", None):
        what = "an encoder (config.is_encoder_decoder)"
        raise refused(name, config, f"has {what}, which the local engine does not support")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise refused(
            name,
            config,
            "states no max_position_embeddings, as models without rotary positions do, which the local engine does not "
            "support",
        )
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        layers = ", ".join(sorted(kinds))
        raise refused(name, config, f"has layers of type {layers}, which the local engine does not support")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and has_experts(config):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ModelLoadError(
            f"model {name!r} ({config.model_type}) has quantized experts ({method}), which the local engine does "
            'not support; give a copy in bfloat16: load it once with transformers (dtype="bfloat16", '
            "quantization_config=Mxfp4Config(dequantize=True) or what belongs to its method), write it with "
            "save_pretrained(folder, save_original_format=False), and give that folder; or use backend=tinker"
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


def load_module(name: str, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerBase]:
    """Module (on the CPU) and tokenizer of a directory or hub id. Raises ModelLoadError."""
    check_model_name(name)
    with _LOADING:
        try:
            config = AutoConfig.from_pretrained(name).get_text_config()
        except (OSError, ValueError, KeyError) as error:
            raise ModelLoadError(f"model {name!r} cannot be loaded: {error}") from error
        try:
            refuse_unsupported(name, config)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
            with _quiet_loading():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    name, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True
                )
            module, found = loaded
        except ModelLoadError:
            raise
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"model {name!r} cannot be loaded: {error}") from error
        except KeyError as error:  # an architecture with attention of its own looks ours up in vain
            why = f"cannot be loaded with the local engine's attention ({error})"
            raise refused(name, config, why) from error
    if missing := sorted(found["missing_keys"]):  # transformers has put random numbers there
        raise ModelLoadError(
            f"model {name!r} ({config.model_type}) has no weights for {missing[0]} and {len(missing) - 1} more: the folder is "
            "not complete, or was written in another layout; fetch or write it again"
        )
    return module, tokenizer
