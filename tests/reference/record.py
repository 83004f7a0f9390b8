"""Records what the reference package, tinker-cookbook of the package index, does with the cases: golden/*.json.

Both packages are called tinker_cookbook, so the reference lives in an environment of its own, and this runs in a folder in
which only these tests can be imported:

    python -m venv /tmp/reference && /tmp/reference/bin/pip install tinker-cookbook==0.6.1 --no-deps
    python -m tests.reference.write_tokenizers /tmp/alone/tokenizers
    ln -s "$PWD/tests" /tmp/alone/tests
    (cd /tmp/alone && /tmp/reference/bin/python -m tests.reference.record tokenizers tests/reference/golden)

Nothing that this file imports may import our package.
"""

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.reference.observe import observe_family, pack
from tests.reference.subjects import FAMILIES
from tinker_cookbook.renderers import ToolCall, get_renderer

# By the paths of the library that is recorded, which has no `models`.
hyperparam_utils: Any = importlib.import_module("tinker_cookbook.hyperparam_utils")
model_info: Any = importlib.import_module("tinker_cookbook.model_info")

GPT_OSS_DATE = "2025-08-05"  # that of our renderer, so that neither depends on the day
HOSTED = ("llama", "qwen", "deepseek", "gpt_oss", "moonshot", "nvidia", "zai", "thinkingmachines")


def tool_call(name: str, arguments: str, call_id: str | None) -> ToolCall:
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments), id=call_id)


def make(tokenizer: PreTrainedTokenizerFast, name: str) -> Any:
    renderer = get_renderer(name, tokenizer)
    if name.startswith("gpt_oss"):
        setattr(renderer, "current_date", GPT_OSS_DATE)  # noqa: B010
    return renderer


def record_models() -> dict[str, Any]:
    """By hub name: renderers, learning rates (LoRA, full; null where none is known), parameters of a rank 1 adapter."""
    found: dict[str, Any] = {}
    for family in HOSTED:
        for name, attributes in getattr(model_info, f"get_{family}_info")().items():
            hub_name = f"{attributes.organization}/{name}"
            parts = {"mlp": (True, False, False), "attn": (False, True, False), "unembed": (False, False, True)}
            found[hub_name] = {
                "renderers": attributes.recommended_renderers,
                "is_chat": attributes.is_chat,
                "is_vl": attributes.is_vl,
                "is_audio_in": attributes.is_audio_in,
                "version": attributes.version_str,
                "size": attributes.size_str,
                "hidden": hyperparam_utils._get_hidden_size(hub_name),  # pyright: ignore[reportAttributeAccessIssue]
                "learning_rates": [learning_rate(hub_name, is_lora) for is_lora in (True, False)],
                "lora": {part: hyperparam_utils.get_lora_param_count(hub_name, 1, *on) for part, on in parts.items()},
            }
    return found


def learning_rate(hub_name: str, is_lora: bool) -> float | None:
    try:
        return hyperparam_utils.get_lr(hub_name, is_lora)
    except (NotImplementedError, model_info.ConfigurationError):
        return None


def write(folder: Path, name: str, recorded: dict[str, Any]) -> None:
    compact = json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))
    # A line per renderer, text or model: a change of one is a change of one line.
    lined = compact.replace('},"', '},\n"').replace('","', '",\n"') if name == "models" else compact
    (folder / f"{name}.json").write_text(lined + "\n", encoding="utf-8")


def main(tokenizers: Path, golden: Path) -> None:
    for name, family in FAMILIES.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizers / f"{name}.json"), bos_token=family.bos, eos_token=family.eos
        )
        observed = observe_family(name, partial(make, tokenizer), tool_call)
        write(golden, name, {**observed, "texts": pack(observed["texts"])})
    write(golden, "models", record_models())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
