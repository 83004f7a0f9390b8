"""Facts about a model without loading it: the matching renderers, and its context length.

The patterns of families interpret a released model's hub name. A local folder is identified by its files.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from tinker_cookbook import backends
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_names import HOSTED_MODELS as HOSTED_MODELS
from tinker_cookbook.model_names import RELEASED, did_you_mean
from tinker_cookbook.models import shapes as model_shapes
from tinker_cookbook.models.families import BASE, FAMILIES, GLM5_3, GPT_OSS, LLAMA3_1, QWEN3_5, QWEN3_8, QWEN3_HYBRID
from tinker_cookbook.plugins import is_reference
from tinker_cookbook.renderers import known_renderer_names
from tinker_cookbook.renderers.chatml import QWEN2_5_SYSTEM_PROMPT
from tinker_cookbook.tokenizer_utils import base_model_of
from tinker_cookbook.utils.lazy import transformers
from tinker_cookbook.utils.narrowing import is_object

logger = logging.getLogger(__name__)

_RENDERER_KEY = "recommended_renderer"


@dataclass(frozen=True)
class ModelAttributes:
    """What a hub name says about a model. `version_str` and `size_str` are as in the name ("3.1", "30B-A3B"), empty if it has
    none.

    is_chat: trained to chat; False for a base model.
    recommended_renderers: names for get_renderer, the default first. All of them only write text, whatever inputs the
        model accepts (is_vl: images, is_audio_in: audio).
    """

    organization: str
    version_str: str
    size_str: str
    is_chat: bool
    recommended_renderers: tuple[str, ...]
    is_vl: bool = False
    is_audio_in: bool = False


def get_llama_info() -> dict[str, ModelAttributes]:
    """Meta's Llama 3 text models, by name without the organization."""
    return _attributes_of_all("meta-llama")


def get_qwen_info() -> dict[str, ModelAttributes]:
    """Qwen3 to Qwen3.8 and Qwen2.5, by name without the organization; only the text part of vision models."""
    return _attributes_of_all("Qwen")


def get_mistral_info() -> dict[str, ModelAttributes]:
    """Mistral models with a Tekken tokenizer of version 3 or 7, by name without the organization."""
    return _attributes_of_all("mistralai")


def get_gemma_info() -> dict[str, ModelAttributes]:
    """Google's Gemma 2 and Gemma 3 models, by name without the organization."""
    return _attributes_of_all("google")


def get_deepseek_info() -> dict[str, ModelAttributes]:
    """DeepSeek-V3.1, V4.1-Flash and the base models, by name without the organization."""
    return _attributes_of_all("deepseek-ai")


def get_gpt_oss_info() -> dict[str, ModelAttributes]:
    """OpenAI's gpt-oss models, by name without the organization."""
    return _attributes_of_all("openai")


def get_moonshot_info() -> dict[str, ModelAttributes]:
    """Moonshot's Kimi K2 and K3.1 models, by name without the organization; only the text part of vision models."""
    return _attributes_of_all("moonshotai")


def get_nvidia_info() -> dict[str, ModelAttributes]:
    """NVIDIA's Nemotron 3 and 3.5 models, by name without the organization; only the text part of the vision model."""
    return _attributes_of_all("nvidia")


def get_zai_info() -> dict[str, ModelAttributes]:
    """Z.ai's GLM models, by name without the organization."""
    return _attributes_of_all("zai-org")


def get_thinkingmachines_info() -> dict[str, ModelAttributes]:
    """The Inkling models of Thinking Machines, by name without the organization. No renderer here writes their format."""
    return _attributes_of_all("thinkingmachines")


def _attributes_of(hub_name: str) -> ModelAttributes | None:
    """The attributes for a model's hub name; None when no pattern matches it."""
    for family in FAMILIES:
        if match := family.pattern.fullmatch(hub_name):
            groups = match.groupdict()
            return ModelAttributes(
                organization=hub_name.partition("/")[0],
                version_str=groups.get("v") or family.version,
                size_str=groups.get("s") or family.size,
                is_chat=family.renderers != BASE,
                recommended_renderers=family.renderers,
                is_vl=family.is_vl,
                is_audio_in=family.is_audio_in,
            )
    return None


def _attributes_of_all(organization: str) -> dict[str, ModelAttributes]:
    """By name without the organization. Raises KeyError for a name that no pattern matches."""
    names = RELEASED[organization]
    attributes_of = {name: _attributes_of(f"{organization}/{name}") for name in names}
    if unmatched := sorted(name for name, attributes in attributes_of.items() if attributes is None):
        raise KeyError(f"{organization}: no pattern matches {', '.join(unmatched)}")
    return {name: attributes for name, attributes in attributes_of.items() if attributes is not None}


def get_model_attributes(model_name: str) -> ModelAttributes:
    """The attributes for the hub id `model_name`.

    Raises ConfigurationError for a local folder, which has fewer attributes, and for a hub id of an unknown family.
    """
    name = base_model_of(model_name)
    if Path(name).expanduser().is_dir():
        raise ConfigurationError(
            f"model_name={model_name!r} is a local folder, whose name does not tell its version and size; "
            "give a hub id, or use get_recommended_renderer_names and get_context_length"
        )
    attributes = _attributes_of(name)
    if attributes is None:
        raise ConfigurationError(f"model_name={model_name!r}: it belongs to no family that this library knows")
    return attributes


def get_recommended_renderer_names(model_name: str) -> list[str]:
    """The renderer names that match `model_name`, a hub id or a local folder; the default first.

    A folder may name its renderer itself: the key "recommended_renderer" in tokenizer_config.json or config.json.
    Otherwise a folder without a chat template is a base model (role_colon), and one with a template is identified by
    its model_type together with the template's characteristic strings.

    Raises ConfigurationError when no matching renderer is known.
    """
    name = base_model_of(model_name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return list(_of_folder(folder))
    attributes = _attributes_of(name)
    if attributes is None:
        raise _unknown(model_name, f"it is neither a local folder nor in a known family{did_you_mean(model_name)}")
    return list(attributes.recommended_renderers)


def get_recommended_renderer_name(model_name: str) -> str:
    """The first of get_recommended_renderer_names. It equals the model's unmodified chat template, except that
    gpt-oss's leaves out the template's system message, as on the hosted service.
    """
    return get_recommended_renderer_names(model_name)[0]


def warn_if_renderer_not_recommended(model_name: str, renderer_name: str | None) -> None:
    """Log a warning when `renderer_name` is not among the matching ones. Silent when none is known, none is given, or
    it is a custom one (module:object, file.py:object).
    """
    if renderer_name is None or is_reference(renderer_name):
        return
    try:
        matching = get_recommended_renderer_names(model_name)
    except ConfigurationError:
        return
    if renderer_name not in matching:
        logger.warning(
            "renderer_name=%r is not recommended for model_name=%r, whose renderers are %s: the model may see a format that it "
            "was not trained on",
            renderer_name,
            model_name,
            ", ".join(matching),
        )


def get_context_length(model_name: str) -> int | None:
    """The context length in the model's config; None when it is not available (a name that only a server knows).

    Sends no request to the hub for a model that `model_shapes` knows.
    """
    folder = Path(shipped_model(model_name)).expanduser()
    if folder.is_dir():
        return _read_context_length(str(folder))
    return model_shapes.context_length_of(base_model_of(model_name)) or _context_length_of_hub_name(model_name)


def _read_context_length(source: str) -> int | None:
    try:
        config = cast(Any, transformers.AutoConfig).from_pretrained(source).get_text_config()
    except (OSError, ValueError):
        return None
    return getattr(config, "max_position_embeddings", None)


@cache
def _context_length_of_hub_name(name: str) -> int | None:
    """Requested from the hub once: loops check every batch against it."""
    backends.try_hub_once()
    return _read_context_length(name)


def _of_folder(folder: Path) -> tuple[str, ...]:
    tokenizer_config, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    for source in (tokenizer_config, config):
        if (named := source.get(_RENDERER_KEY)) is not None:
            if named not in known_renderer_names():
                raise _unknown(str(folder), f"its {_RENDERER_KEY} {named!r} is unknown")
            return (str(named),)
    template = _chat_template(folder, tokenizer_config)
    if not template:
        return BASE
    model_type = config.get("model_type")
    matching = (known.renderers for known in _TEMPLATES if model_type in known.model_types and known.fits(template))
    names = next(matching, None)
    if names is None:
        raise _unknown(str(folder), f"no renderer is known for the chat template of model_type {model_type!r}")
    opens_block = "<think>" in template.rpartition("add_generation_prompt")[2] and "enable_thinking" not in template
    if names[0].startswith("qwen3") and opens_block:
        raise _unknown(str(folder), "its prompts open a think block, which no known renderer supports")
    return names


class _Template(NamedTuple):
    """The renderers for a chat template that contains all strings in `has` and none in `lacks`."""

    model_types: tuple[str, ...]
    renderers: tuple[str, ...]
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fits(self, template: str) -> bool:
        return all(mark in template for mark in self.has) and not any(mark in template for mark in self.lacks)


# A space after [INST] means a SentencePiece tokenizer; the other tokens mean version 11 or later.
_NO_TEKKEN = ("[INST] ", "[ARGS]", "[THINK]")
_QWEN3_TYPES, _MISTRAL_TYPES = ("qwen3", "qwen3_moe"), ("mistral", "mistral3")
_QWEN3_5_TYPES, _QWEN3_VL_TYPES = ("qwen3_5", "qwen3_5_moe"), ("qwen3_vl", "qwen3_vl_moe")
_TEMPLATES = (
    _Template(_QWEN3_5_TYPES, QWEN3_8, ("<|im_start|>", "<function=", "reasoning_effort")),
    _Template(_QWEN3_5_TYPES, QWEN3_5, ("<|im_start|>", "<function=", "enable_thinking")),
    _Template(_QWEN3_TYPES, QWEN3_HYBRID, ("<|im_start|>", "think")),
    _Template(_QWEN3_TYPES, ("qwen3_instruct",), ("<|im_start|>",)),
    _Template(_QWEN3_VL_TYPES, ("qwen3_vl",), ("<|im_start|>", "think")),
    _Template(_QWEN3_VL_TYPES, ("qwen3_vl_instruct",), ("<|im_start|>",)),
    _Template(("qwen2",), ("qwen2_5",), ("<|im_start|>", QWEN2_5_SYSTEM_PROMPT), ("<think>",)),
    _Template(("llama",), LLAMA3_1, ("<|start_header_id|>", "<|eot_id|>", '"ipython', '"parameters": '), ("think",)),
    _Template(("llama",), ("llama3",), ("<|start_header_id|>", "<|eot_id|>"), ("think",)),
    _Template(("gemma2", "gemma3", "gemma3_text"), ("gemma",), ("<start_of_turn>",), ("<start_function",)),
    _Template(_MISTRAL_TYPES, ("mistral",), ("[INST]", "[SYSTEM_PROMPT]"), _NO_TEKKEN),
    _Template(_MISTRAL_TYPES, ("mistral_v3",), ("[INST]", "[AVAILABLE_TOOLS]"), _NO_TEKKEN),
    _Template(("glm_moe_dsa",), GLM5_3, ("[gMASK]<sop>", "Reasoning Effort: ", "clear_thinking"), ("enable_thinking",)),
    _Template(("gpt_oss",), GPT_OSS, ("<|channel|>", "<|message|>")),
)


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str:
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
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
    if not is_object(content):
        raise ConfigurationError(f"{path} must hold a JSON object; fix or replace the file")
    return content


def _unknown(model_name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"model_name={model_name!r}: cannot tell its renderer, because {reason}. "
        f"Pass renderer_name=, one of {', '.join(known_renderer_names())}"
    )
