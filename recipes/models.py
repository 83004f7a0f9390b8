"""The known models: renderer, size, suggested rank and learning rate, and the engines that support them.

    python -m recipes.models
    python -m recipes.models like=qwen3
    python -m recipes.models model_name=Qwen/Qwen3-8B

Names, renderers and sizes are known without a download; any other directory or hub id that transformers can load works
too. Renderers marked * have not been compared with the recorded output of another implementation.
"""

import contextlib
from typing import Any

import chz
from rich.console import Console
from rich.table import Table

from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import AdapterKeys, OptionalModelKey
from tinker_cookbook.models import hyperparameters as hyperparam_utils
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models import shapes as model_shapes
from tinker_cookbook.renderers.registry import UNVERIFIED
from tinker_cookbook.utils.fields import docs

ORGANIZATIONS = {
    "Qwen": model_info.get_qwen_info,
    "meta-llama": model_info.get_llama_info,
    "deepseek-ai": model_info.get_deepseek_info,
    "openai": model_info.get_gpt_oss_info,
    "moonshotai": model_info.get_moonshot_info,
    "nvidia": model_info.get_nvidia_info,
    "mistralai": model_info.get_mistral_info,
    "google": model_info.get_gemma_info,
    "zai-org": model_info.get_zai_info,
}
RANK = 32
REFUSED = "no: "
"""Prefix of the answer for a model that the local engine does not support."""


@chz.chz(typecheck=True)
class CLIConfig(OptionalModelKey, AdapterKeys):
    """Keys of `python -m recipes.models`."""

    DOCS = docs(
        model_name="all about one model; a directory or a hub id", lora_rank="rank that adapters are counted for"
    )

    like: str = chz.field(default="", doc="only models whose name contains this, ignoring case")


def known_models() -> list[str]:
    """The hub names with a renderer."""
    return [f"{organization}/{name}" for organization, infos in ORGANIZATIONS.items() for name in infos()]


def renderer_names(model_name: str) -> list[str]:
    names = model_info.get_recommended_renderer_names(model_name)
    return [f"{name}*" if name in UNVERIFIED else name for name in names]


def facts(model_name: str, lora_rank: int, may_download: bool = False) -> dict[str, str]:
    """Facts about a model, as text; "?" for those that are unknown or need a download."""
    context = model_info.get_context_length(model_name) if may_download else model_shapes.context_length_of(model_name)
    known_facts = {"renderer": "?", "parameters": "?", "context": "?" if context is None else f"{context:,}"}
    known_facts |= {"state": "?", "adapter": "?", "learning rate": "?"}
    known = {
        "renderer": lambda: renderer_names(model_name)[0],
        "parameters": lambda: _short(hyperparam_utils.get_full_finetune_param_count(model_name)),
        "state": lambda: _mebibytes(hyperparam_utils.get_state_bytes(model_name)),
        "adapter": lambda: _short(hyperparam_utils.get_lora_param_count(model_name, lora_rank)),
        "learning rate": lambda: f"{hyperparam_utils.get_lr(model_name):.1e}",
    }
    for key, read in known.items():
        if key != "renderer" and not may_download and not hyperparam_utils.is_known(model_name):
            continue
        try:
            known_facts[key] = read()
        except (ConfigurationError, NotImplementedError):
            continue
    known_facts["local engine"] = "?"
    known_facts["hosted"] = "yes" if model_name in model_info.HOSTED_MODELS else "-"
    if not may_download and not hyperparam_utils.is_known(model_name):
        return known_facts
    with contextlib.suppress(ConfigurationError):
        known_facts["local engine"] = local_engine(model_name, hyperparam_utils.model_config(model_name))
    return known_facts


def local_engine(model_name: str, config: Any) -> str:
    """How the local engine supports a model, by its own checks; docs/models.md has a table by architecture."""
    if (refusal := backends.why_not_local(model_name, config)) is not None:
        return _reason(refusal)
    if backends.samples_only(config):
        return "samples only"
    return "trains (not the experts) and samples" if backends.leaves_experts(config) else "trains and samples"


def _reason(refusal: str) -> str:
    """The part of the engine's error that describes the model."""
    return REFUSED + refusal.partition(") ")[2].partition(",")[0]


def _short(count: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count else "-"


def show(names: list[str], lora_rank: int) -> None:
    """One table, a row for each model."""
    columns = ["renderer", "parameters", "context", "state", "adapter", "learning rate", "local engine", "hosted"]
    table = Table("model", *(f"adapter, rank {lora_rank}" if name == "adapter" else name for name in columns), box=None)
    for name in names:
        known = facts(name, lora_rank)
        table.add_row(name, *(known[column] for column in columns))
    Console(width=None if Console().is_terminal else 204).print(table)


async def main(cli: CLIConfig) -> None:
    if cli.model_name is not None:
        known = facts(cli.model_name, cli.lora_rank, may_download=True)
        try:
            renderers = ", ".join(renderer_names(cli.model_name))
        except ConfigurationError:
            if not known["local engine"].startswith(REFUSED):
                raise
            renderers = "none is known to fit"
        print(f"{cli.model_name}")
        print(f"  renderers      {renderers}")
        for key, value in known.items():
            print(f"  {key.ljust(14)} {value}")
        return
    names = [name for name in known_models() if cli.like.lower() in name.lower()]
    if not names:
        raise ConfigurationError(f"like={cli.like!r}: no known model has this in its name; leave it out to list all")
    show(names, cli.lora_rank)
    print("\n*: renderer not compared with recorded output of another implementation.")
    print("Context in tokens. State: memory per sequence in the local engine in addition to its KV cache, in bfloat16.")
    print("Adapters on every linear; learning rate: the service's rule for LoRA, if it has one.")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
