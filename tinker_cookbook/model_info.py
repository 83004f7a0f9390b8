"""What is known of a model without loading it: which renderers fit it, and how long its context is.

What hub names say is listed in model_families.py; this file answers for a name or a local folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tinker_cookbook import model_families
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_families import ModelAttributes
from tinker_cookbook.renderers import known_renderer_names
from tinker_cookbook.renderers.qwen2_5 import DEFAULT_SYSTEM_PROMPT as QWEN2_5_SYSTEM_PROMPT
from tinker_cookbook.utils.lazy import transformers

__all__ = [
    "ModelAttributes",
    "get_context_length",
    "get_deepseek_info",
    "get_gemma_info",
    "get_gpt_oss_info",
    "get_llama_info",
    "get_mistral_info",
    "get_model_attributes",
    "get_qwen_info",
    "get_recommended_renderer_name",
    "get_recommended_renderer_names",
    "warn_if_renderer_not_recommended",
]
logger = logging.getLogger(__name__)

_RENDERER_KEY = "recommended_renderer"


def get_llama_info() -> dict[str, ModelAttributes]:
    """Meta's Llama 3 text models, by name without the organization."""
    return model_families.attributes_of_all("meta-llama", model_families.LLAMA)


def get_qwen_info() -> dict[str, ModelAttributes]:
    """Qwen3 and Qwen2.5 text models, by name without the organization."""
    return model_families.attributes_of_all("Qwen", model_families.QWEN)


def get_mistral_info() -> dict[str, ModelAttributes]:
    """Mistral models with a Tekken tokenizer of version 3 or 7, by name without the organization."""
    return model_families.attributes_of_all("mistralai", model_families.MISTRAL)


def get_gemma_info() -> dict[str, ModelAttributes]:
    """Google's Gemma 2 and Gemma 3 models, by name without the organization."""
    return model_families.attributes_of_all("google", model_families.GEMMA)


def get_deepseek_info() -> dict[str, ModelAttributes]:
    """DeepSeek-V3.1 and the base models, by name without the organization."""
    return model_families.attributes_of_all("deepseek-ai", model_families.DEEPSEEK)


def get_gpt_oss_info() -> dict[str, ModelAttributes]:
    """OpenAI's gpt-oss models, by name without the organization."""
    return model_families.attributes_of_all("openai", model_families.GPT_OSS)


def get_model_attributes(model_name: str) -> ModelAttributes:
    """What the hub id `model_name` says of the model.

    Raises ConfigurationError for a local folder, which says less, and for a hub id of no known family.
    """
    name = _without_adapter(model_name)
    if Path(name).expanduser().is_dir():
        raise ConfigurationError(
            f"model_name={model_name!r} is a local folder, whose name says nothing of its version and size; "
            "give a hub id, or ask get_recommended_renderer_names and get_context_length"
        )
    attributes = model_families.attributes_of(name)
    if attributes is None:
        raise ConfigurationError(f"model_name={model_name!r}: it is of no family that this library knows")
    return attributes


def get_recommended_renderer_names(model_name: str) -> list[str]:
    """The names for get_renderer that fit `model_name`, a hub id or a local folder; the default first.

    A folder may name its renderer itself: the key "recommended_renderer" in tokenizer_config.json or config.json.
    Otherwise a folder without a chat template is a base model (role_colon), and one with a template is told by its
    model_type together with what marks the family's template.

    Raises ConfigurationError when no renderer is known to fit.
    """
    name = _without_adapter(model_name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return list(_of_folder(folder))
    attributes = model_families.attributes_of(name)
    if attributes is None:
        raise _unknown(model_name, "it is neither a local folder nor of a known family")
    return list(attributes.recommended_renderers)


def get_recommended_renderer_name(model_name: str) -> str:
    """The first of get_recommended_renderer_names: the one that equals the model's chat template as it is."""
    return get_recommended_renderer_names(model_name)[0]


def warn_if_renderer_not_recommended(model_name: str, renderer_name: str | None) -> None:
    """Log a warning when `renderer_name` is not among those known to fit. Silent when none is known, or none is given."""
    if renderer_name is None:
        return
    try:
        fitting = get_recommended_renderer_names(model_name)
    except ConfigurationError:
        return
    if renderer_name not in fitting:
        logger.warning(
            "renderer_name=%r is not made for model_name=%r, whose renderers are %s: the model may see a format that it "
            "was not trained on",
            renderer_name,
            model_name,
            ", ".join(fitting),
        )


def get_context_length(model_name: str) -> int | None:
    """Positions that the model was made for, by its config; None when that cannot be had (a name only a server knows)."""
    folder = Path(model_name).expanduser()
    return _read_context_length(str(folder)) if folder.is_dir() else _context_length_of_hub_name(model_name)


@cache
def _context_length_of_hub_name(name: str) -> int | None:
    """Asked of the hub once: loops check every batch against it."""
    return _read_context_length(name)


def _read_context_length(source: str) -> int | None:
    try:
        config = transformers.AutoConfig.from_pretrained(source).get_text_config()
    except (OSError, ValueError):
        return None
    return getattr(config, "max_position_embeddings", None)


def _without_adapter(model_name: str) -> str:
    return model_name.split(":peft:")[0]


def _of_folder(folder: Path) -> tuple[str, ...]:
    tokenizer_config, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    for source in (tokenizer_config, config):
        if (named := source.get(_RENDERER_KEY)) is not None:
            if named not in known_renderer_names():
                raise _unknown(str(folder), f"its {_RENDERER_KEY} {named!r} is unknown")
            return (str(named),)
    template = _chat_template(folder, tokenizer_config)
    if not template:
        return model_families.BASE
    model_type = config.get("model_type")
    names = _BY_MODEL_TYPE.get(str(model_type), lambda _: ())(template)
    if not names:
        raise _unknown(str(folder), f"no renderer is known for the chat template of model_type {model_type!r}")
    if names[0].startswith("qwen3") and _opens_think_block(template):
        raise _unknown(str(folder), "its prompts open a think block, which no renderer does")
    return names


def _opens_think_block(template: str) -> bool:
    return "enable_thinking" not in template and "<think>" in template.rpartition("add_generation_prompt")[2]


def _of_qwen3_template(template: str) -> tuple[str, ...]:
    if "<|im_start|>" not in template:
        return ()
    return model_families.QWEN3_HYBRID if "think" in template else ("qwen3_instruct",)


def _of_mistral_template(template: str) -> tuple[str, ...]:
    # A space after [INST] marks a SentencePiece tokenizer, the other tokens the versions from 11 on.
    if "[INST]" not in template or any(mark in template for mark in ("[INST] ", "[ARGS]", "[THINK]")):
        return ()
    if "[SYSTEM_PROMPT]" in template:
        return ("mistral",)
    return ("mistral_v3",) if "[AVAILABLE_TOOLS]" in template else ()


def _if_marked(
    renderers: tuple[str, ...], *marks: str, without: tuple[str, ...] = ()
) -> Callable[[str], tuple[str, ...]]:
    """The renderers for a template that has all `marks` and nothing of `without`."""

    def read(template: str) -> tuple[str, ...]:
        fits = all(mark in template for mark in marks) and not any(mark in template for mark in without)
        return renderers if fits else ()

    return read


_GEMMA_TEMPLATE = _if_marked(("gemma",), "<start_of_turn>", without=("<start_function",))
_BY_MODEL_TYPE: dict[str, Callable[[str], tuple[str, ...]]] = {
    "qwen3": _of_qwen3_template,
    "qwen3_moe": _of_qwen3_template,
    "qwen2": _if_marked(("qwen2_5",), "<|im_start|>", QWEN2_5_SYSTEM_PROMPT, without=("<think>",)),
    "llama": _if_marked(("llama3",), "<|start_header_id|>", "<|eot_id|>", without=("think",)),
    "gemma2": _GEMMA_TEMPLATE,
    "gemma3": _GEMMA_TEMPLATE,
    "gemma3_text": _GEMMA_TEMPLATE,
    "mistral": _of_mistral_template,
    "mistral3": _of_mistral_template,
    "gpt_oss": _if_marked(model_families.GPT_OSS_EFFORTS, "<|channel|>", "<|message|>"),
}


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if not isinstance(template, str):
        raise _unknown(str(folder), "it has several chat templates")
    return template


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON ({error}); fix or replace the file") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object; fix or replace the file")
    return content


def _unknown(model_name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"model_name={model_name!r}: cannot tell its renderer, because {reason}. "
        f"Pass renderer_name=, one of {', '.join(known_renderer_names())}"
    )
