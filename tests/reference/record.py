"""Records what the reference package does: cd tests; python -m reference.record TOKENIZERS GOLDEN

To be run by the interpreter of an environment of its own, which holds the reference (README.md says how it is made). This
file and those it imports must not import our package: both are called tinker_cookbook.
"""

import json
import sys
from pathlib import Path
from typing import Any

from .observe import observe_family
from .subjects import FAMILIES
from transformers import PreTrainedTokenizerFast

from tinker_cookbook import hyperparam_utils, model_info
from tinker_cookbook.renderers import ToolCall, get_renderer

HOSTED = ("llama", "qwen", "deepseek", "gpt_oss", "moonshot", "nvidia")


def tool_call(name: str, arguments: str, call_id: str | None) -> ToolCall:
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments), id=call_id)


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
        write(golden, name, observe_family(name, lambda renderer: get_renderer(renderer, tokenizer), tool_call))  # noqa: B023
    write(golden, "models", record_models())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
