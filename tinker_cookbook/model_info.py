"""What is known of a model without loading it: which renderer fits it, and how long its context is."""

import json
import re
from pathlib import Path

from transformers import AutoConfig

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import known_renderer_names

_RENDERER_KEY = "recommended_renderer"
_SIZE = r"\d+(\.\d+)?B(-A\d+(\.\d+)?B)?"
# Only models whose chat template a renderer equals: a near relative (Qwen2.5, Qwen3.5, Thinking-2507) is not a match.
_HUB_FAMILIES = (
    (re.compile(rf"Qwen/Qwen3-{_SIZE}-Instruct-2507(-FP8)?"), "qwen3_instruct"),
    (re.compile(rf"Qwen/Qwen3-{_SIZE}(-FP8)?"), "qwen3"),
    (re.compile(r"[^/]+/[^/]+-Base"), "role_colon"),
    (re.compile(rf"meta-llama/(Meta-)?Llama-3(\.\d)?-{_SIZE}"), "role_colon"),
)
_QWEN3_MODEL_TYPES = ("qwen3", "qwen3_moe")


def get_recommended_renderer_name(model_name: str) -> str:
    """The name for get_renderer that matches the chat template of `model_name`, a hub id or a local folder.

    A folder may name it itself: the key "recommended_renderer" in tokenizer_config.json or config.json. Otherwise a
    folder without a chat template is a base model (role_colon), and a Qwen3 folder is told apart by whether its
    template speaks of thinking.

    Raises ConfigurationError when no renderer is known to fit.
    """
    name = model_name.split(":peft:")[0]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_folder(folder)
    for pattern, renderer_name in _HUB_FAMILIES:
        if pattern.fullmatch(name):
            return renderer_name
    raise _unknown(model_name, "it is neither a local folder nor of a known family")


def get_context_length(model_name: str) -> int | None:
    """Positions that the model was made for, by its config; None when that cannot be had (a name only a server knows)."""
    try:
        config = AutoConfig.from_pretrained(str(Path(model_name).expanduser())).get_text_config()
    except (OSError, ValueError):
        return None
    return getattr(config, "max_position_embeddings", None)


def _of_folder(folder: Path) -> str:
    tokenizer_config, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    for source in (tokenizer_config, config):
        if (named := source.get(_RENDERER_KEY)) is not None:
            if named not in known_renderer_names():
                raise _unknown(str(folder), f"its {_RENDERER_KEY} {named!r} is unknown")
            return str(named)
    template = _chat_template(folder, tokenizer_config)
    if not template:
        return "role_colon"
    model_type = config.get("model_type")
    if model_type not in _QWEN3_MODEL_TYPES or "<|im_start|>" not in template:
        raise _unknown(str(folder), f"no renderer is known for the chat template of model_type {model_type!r}")
    if "enable_thinking" not in template and "<think>" in template.rpartition("add_generation_prompt")[2]:
        raise _unknown(str(folder), "its prompts open a think block, which no renderer does")
    return "qwen3" if "think" in template else "qwen3_instruct"


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
        raise ConfigurationError(f"{path} is not valid JSON ({error}); mend or replace the file") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object; mend or replace the file")
    return content


def _unknown(model_name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"model_name={model_name!r}: cannot tell its renderer, because {reason}. "
        f"Pass renderer_name=, one of {', '.join(known_renderer_names())}"
    )
