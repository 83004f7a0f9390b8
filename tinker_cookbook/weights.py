"""Export trained weights: a PEFT adapter folder, or a merged model, each with a model card.

The engines provide a checkpoint as an archive or as single files; the export is the same for all.
"""

import asyncio
import json
import logging
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, TypeVar

from tinker_cookbook import backends
from tinker_cookbook.archive_address import archive_address
from tinker_cookbook.clients import ServiceClient
from tinker_cookbook.encrypted_weights import fetch_encrypted
from tinker_cookbook.exceptions import ConfigurationError, WeightsAdapterError, WeightsDownloadError, WeightsMergeError
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.stores.training_store import CONFIG_BASE_NAME, TrainingRunStore
from tinker_cookbook.utils.files import flatten, write_text
from tinker_cookbook.utils.metric_names import each_once
from tinker_cookbook.utils.misc_utils import markdown_table, not_none

logger = logging.getLogger(__name__)

__all__ = [
    "Exported",
    "ModelCardConfig",
    "build_hf_model",
    "build_lora_adapter",
    "download",
    "download_adapter",
    "export",
    "generate_model_card",
    "model_card",
    "publish_to_hf_hub",
]

Format = Literal["adapter", "vllm", "merged"]
"""`adapter`: for PEFT. `vllm`: an adapter whose routed experts have the names that vLLM reads. `merged`: a whole model."""

T = TypeVar("T")

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CARD_BASE_NAME = "README.md"
_CARD_SKIPS = ("time/", "progress", "step")
_SCHEMES = ("file:", "https:", "http:")


@dataclass(frozen=True)
class Exported:
    """The files written."""

    folder: Path
    base_model: str
    max_abs_diff: float | None
    """merged: largest difference of logits from base model plus adapter; None for an adapter, which is copied"""


async def export(
    service: ServiceClient,
    model_path: str,
    output: str | Path,
    format: Format = "adapter",
    *,
    base_model: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    log_path: str | Path | None = None,
    as_saved: bool = False,
) -> Exported:
    """Write the weights of a checkpoint in a form that PEFT (adapter), vLLM (vllm), or all of them (merged) can load.

    Args:
        model_path: the checkpoint (tinker://...).
        output: the folder to write; must not exist unless `overwrite` is set and it is an earlier export.
        base_model: the base model's location; None: the name in the checkpoint's run.
        dtype: for merged models, of the saved weights; None: that of the base model.
        log_path: the run's folder, for the config and the metrics in the model card.
        as_saved: with format="adapter", keep the archive's tensor names; those of the hosted service are not PEFT's.

    Raises:
        ConfigurationError: an invalid format or dtype, or an output that must not be overwritten.
        WeightsDownloadError: the checkpoint is not available or contains no adapter.
    """
    target = Path(output).expanduser().absolute()
    _check(target, format, dtype, overwrite)
    training_run = await service.create_rest_client().get_training_run_by_tinker_path_async(model_path)
    base = base_model or training_run.base_model
    card = model_card(model_path, base, format, log_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as staging:
        adapter = await download_adapter(service, model_path, Path(staging) / "adapter", base)
        if format == "merged":
            # Seconds to minutes of computation, off the event loop.
            difference = await asyncio.to_thread(backends.merge_adapter, adapter, target, base, dtype, overwrite)
            write_text(target / CARD_BASE_NAME, card)
            return Exported(target, base, difference)
        if not as_saved:
            converted = Path(staging) / "converted"
            adapter = await asyncio.to_thread(backends.adapter_in_form, adapter, converted, base, format == "vllm")
        write_text(adapter / CARD_BASE_NAME, card)
        if target.exists():
            shutil.rmtree(target)
        adapter.rename(target)
    return Exported(target, base, None)


async def download_adapter(service: ServiceClient, model_path: str, folder: Path, base_model: str) -> Path:
    """Download a checkpoint's archive and unpack its PEFT adapter into `folder`, which is created. Returns the folder.

    Only the adapter's two files are extracted; the base model is written into its config, because the hosted service
    may leave it empty. A checkpoint of kind external_weights is downloaded file by file. The other kinds come as an
    archive from the local engine, SDKs before 0.38 and servers that have the route; elsewhere a training checkpoint
    needs an encrypted export (`encrypted_weights`), and sampler weights are not available.
    """
    rest: Any = service.create_rest_client()
    if "/external_weights/" in model_path:
        urls = (await rest.get_external_weights_urls(model_path)).urls
        await asyncio.to_thread(_fetch_files, urls, folder, model_path)
        _name_base_model(folder, base_model)
        return folder
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        address, why = str((await rest.get_checkpoint_archive_url_from_tinker_path(model_path)).url), ""
    else:
        address, why = await archive_address(rest, model_path)
    if address is not None:
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            await asyncio.to_thread(_fetch, address, Path(archive.name), model_path)
            _unpack(Path(archive.name), folder, model_path)
    elif "/weights/" in model_path:
        with tempfile.TemporaryDirectory() as encrypted:
            folder.mkdir(parents=True)
            fetch = partial(_fetch_into, Path(encrypted), model_path)
            await fetch_encrypted(service, rest, model_path, folder, fetch)
            _adapter_files({path.name: path for path in folder.iterdir()}, model_path)
    else:
        raise WeightsDownloadError(
            f"{model_path}: the server offers no sampler weights ({why}), only external weights; save them with "
            "training_client.save_weights_external(name) and give that path"
        )
    _name_base_model(folder, base_model)
    return folder


def _name_base_model(folder: Path, base_model: str) -> None:
    config_path = folder / ADAPTER_CONFIG
    config = json.loads(config_path.read_text(encoding="utf-8"))
    write_text(config_path, json.dumps({**config, "base_model_name_or_path": base_model}, indent=2) + "\n")


def model_card(model_path: str, base_model: str, format: Format, log_path: str | Path | None = None) -> str:
    """A README.md: what the weights are, how to load them, and the config and metrics from the run's folder.

    Metrics show their first and last logged values.
    """
    config = _run_config(log_path)
    recipe = config.get("recipe_name")
    head = {
        "base_model": base_model,
        "library_name": _LIBRARY[format],
        "tags": ["lora", "tinker", *([recipe] if recipe else [])],
    }
    what = _WHAT[format]
    made = f", trained with the recipe `{recipe}`" if recipe else ""
    parts = [
        _front(head),
        f"# {what}",
        f"{what} of `{base_model}`{made}. Checkpoint: `{model_path}`.",
        _USE[format],
    ]
    if log_path is not None:
        if rows := _metric_rows(log_path):
            parts += ["## Metrics", markdown_table([["metric", "first", "last"], *rows])]
        leaves = [[f"`{key}`", f"`{json.dumps(value)}`"] for key, value in flatten(config).items()]
        if leaves:
            parts += ["## Config", markdown_table([["key", "value"], *leaves])]
    return "\n\n".join(parts) + "\n"


def _front(head: Mapping[str, Any]) -> str:
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    return f"---\n{lines}\n---"


_LIBRARY: Mapping[Format, str] = {"adapter": "peft", "vllm": "peft", "merged": "transformers"}
_WHAT: Mapping[Format, str] = {
    "adapter": "LoRA adapter",
    "vllm": "LoRA adapter for vLLM",
    "merged": "Model with a LoRA adapter merged in",
}
_USE: Mapping[Format, str] = {
    "adapter": """```python
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("<this folder>")
```""",
    "vllm": """```sh
vllm serve <base model> --enable-lora --max-lora-rank <at least the rank> --lora-modules <name>=<this folder>
```""",
    "merged": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```""",
}


def _check(target: Path, format: str, dtype: str | None, overwrite: bool) -> None:
    if format not in _USE:
        raise ConfigurationError(f"format={format!r}: must be {' or '.join(_USE)}")
    if dtype is not None and format != "merged":
        raise ConfigurationError(
            f"dtype={dtype!r}: an adapter is exported as it was saved; use format=merged, or drop dtype"
        )
    if not target.exists():
        return
    if not overwrite:
        raise ConfigurationError(f"output={str(target)!r}: exists; give another folder, or overwrite=True")
    sign = "config.json" if format == "merged" else ADAPTER_CONFIG
    if not target.is_dir() or (any(target.iterdir()) and not (target / sign).is_file()):
        raise ConfigurationError(f"output={str(target)!r}: is not an earlier export (no {sign}), and is not replaced")


def _fetch(url: str, target: Path, model_path: str) -> None:
    if not url.startswith(_SCHEMES):
        raise WeightsDownloadError(
            f"{model_path}: its archive is at {url!r}, which is neither a file nor a web address"
        )
    try:
        with urllib.request.urlopen(url) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)
            stated, size = source.headers.get("Content-Length"), file.tell()
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise WeightsDownloadError(f"{model_path}: its archive could not be fetched ({why}); try again") from error
    if stated is not None and int(stated) != size:  # read() treats a broken connection as the end
        raise WeightsDownloadError(f"{model_path}: only {size} of {stated} bytes arrived; try again")


def _fetch_files(urls: Mapping[str, str], folder: Path, model_path: str) -> None:
    folder.mkdir(parents=True)
    for name, url in _adapter_files(urls, model_path).items():
        _fetch(url, folder / name, model_path)


def _fetch_into(folder: Path, model_path: str, urls: Mapping[str, str]) -> dict[str, Path]:
    """Download files into a folder and return their paths. Only the last component of a name is used, so that no path
    escapes the folder.
    """
    files = {name: folder / Path(name).name for name in urls}
    for name, url in urls.items():
        _fetch(url, files[name], model_path)
    return files


def _adapter_files(by_path: Mapping[str, T], model_path: str) -> dict[str, T]:
    """The adapter's two files, by name, from all files of a checkpoint."""
    by_name = {Path(path).name: file for path, file in by_path.items()}
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if name not in by_name:
            raise WeightsDownloadError(f"{model_path}: has no {name}, only {', '.join(sorted(by_path))}")
    return {name: by_name[name] for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def _unpack(archive: Path, folder: Path, model_path: str) -> None:
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            members = {member.name: member for member in tar.getmembers() if member.isfile()}
            for name, member in _adapter_files(members, model_path).items():
                with not_none(tar.extractfile(member)) as source, open(folder / name, "wb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise WeightsDownloadError(f"{model_path}: its archive is damaged ({error}); try again") from error


def _run_config(log_path: str | Path | None) -> dict[str, Any]:
    if log_path is None:
        return {}
    config = TrainingRunStore.in_folder(log_path).read_config()
    if config is None:
        raise ConfigurationError(f"log_path={str(log_path)!r}: is not a run's folder (no {CONFIG_BASE_NAME})")
    return config


def _metric_rows(log_path: str | Path) -> list[list[str]]:
    ends: dict[str, tuple[float, float]] = {}
    for line in each_once(read_metrics(log_path)):
        for key, value in line.items():
            if isinstance(value, int | float) and not key.startswith(_CARD_SKIPS):
                ends[key] = (ends[key][0] if key in ends else value, value)
    return [[f"`{key}`", f"{first:.4g}", f"{last:.4g}"] for key, (first, last) in sorted(ends.items())]


def download(*, tinker_path: str, output_dir: str, base_url: str | None = None) -> str:
    """Download a checkpoint's PEFT adapter into `output_dir`, which must not exist; return the folder. Blocks, even in
    an event loop.

    Raises as in `export`.
    """
    service = backends.create_service_client(base_url=base_url)
    # In a thread with its own event loop: in a notebook the caller's is already running.
    with ThreadPoolExecutor(1) as thread:
        return str(thread.submit(asyncio.run, export(service, tinker_path, output_dir, as_saved=True)).result().folder)


def build_lora_adapter(
    *, base_model: str, adapter_path: str, output_path: str, trust_remote_code: bool | None = None
) -> None:
    """Write a downloaded adapter to `output_path`, with the base model's name in its config, for PEFT and vLLM.

    It is copied if it has PEFT's names of linear layers; routed experts and hosted names are renamed for vLLM.
    Raises ConfigurationError for an output that exists, and WeightsAdapterError for a folder without an adapter, or with one
    that does not fit the base model.
    """
    _refuse(trust_remote_code=trust_remote_code)
    source, target = Path(adapter_path).expanduser(), Path(output_path).expanduser()
    _check(target, "adapter", None, overwrite=False)
    if not (source / ADAPTER_CONFIG).is_file():
        raise WeightsAdapterError(f"adapter_path={adapter_path!r}: holds no {ADAPTER_CONFIG}")
    try:
        if backends.adapter_in_form(source, target, base_model, for_vllm=True) == source:
            shutil.copytree(source, target)
    except Exception as error:
        if not backends.is_engine_error(error):
            raise
        raise WeightsAdapterError(f"adapter_path={adapter_path!r}, base_model={base_model!r}: {error}") from error
    _name_base_model(target, base_model)


def build_hf_model(
    *,
    base_model: str,
    adapter_path: str,
    output_path: str,
    dtype: str = "bfloat16",
    trust_remote_code: bool | None = None,
    merge_strategy: Literal["auto", "full"] = "auto",
    dequantize: bool = False,
    quantize: str | None = None,
    serving_format: str | None = None,
    device: str | None = None,
) -> None:
    """Merge a downloaded adapter into its base model, as a folder for transformers and vLLM. Computed on the CPU.

    Raises ConfigurationError for an existing output and for unsupported options (quantized weights, code from the
    hub), and WeightsMergeError if adapter or base model cannot be loaded, or do not match.
    """
    _refuse(
        trust_remote_code=trust_remote_code, dequantize=dequantize, quantize=quantize, serving_format=serving_format
    )
    if merge_strategy not in ("auto", "full") or device not in (None, "cpu"):
        raise ConfigurationError(
            f"merge_strategy={merge_strategy!r}, device={device!r}: the whole model is merged, on the CPU; leave them out"
        )
    target = Path(output_path).expanduser().absolute()
    _check(target, "merged", dtype, overwrite=False)
    try:
        backends.merge_adapter(Path(adapter_path).expanduser(), target, base_model, dtype, False)
    except Exception as error:
        if not backends.is_engine_error(error):
            raise
        raise WeightsMergeError(f"adapter_path={adapter_path!r}, base_model={base_model!r}: {error}") from error


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ConfigurationError(f"{name}={value!r}: is not offered here; leave it out")


@dataclass(frozen=True)
class ModelCardConfig:
    """Additional fields of a model card's header."""

    base_model: str
    datasets: list[str] = field(default_factory=list[str])
    tags: list[str] = field(default_factory=list[str])
    license: str | None = None
    language: list[str] = field(default_factory=list[str])


def generate_model_card(*, config: ModelCardConfig, repo_id: str | None = None, model_path: str | None = None) -> Any:
    """A `huggingface_hub.ModelCard` of an adapter or merged model.

    Args:
        repo_id: the target repository, used as the heading.
        model_path: its folder, to tell whether it is an adapter; None: a merged model.
    """
    from huggingface_hub import ModelCard

    is_adapter = model_path is not None and (Path(model_path) / ADAPTER_CONFIG).is_file()
    format: Format = "adapter" if is_adapter else "merged"
    lists = {"datasets": config.datasets, "language": config.language}
    head = {
        "base_model": config.base_model,
        "library_name": _LIBRARY[format],
        "tags": ["tinker", *(["lora"] if is_adapter else []), *config.tags],
        **{key: value for key, value in lists.items() if value},
        **({"license": config.license} if config.license else {}),
    }
    parts = [_front(head), f"# {repo_id or _WHAT[format]}", f"{_WHAT[format]} of `{config.base_model}`.", _USE[format]]
    return ModelCard("\n\n".join(parts) + "\n")


def publish_to_hf_hub(
    *,
    model_path: str,
    repo_id: str,
    private: bool = True,
    token: str | None = None,
    model_card: ModelCardConfig | None = None,
) -> str:
    """Upload a folder with an adapter or a merged model to the Hugging Face hub; return the repository's address.

    Args:
        repo_id: `owner/name`; the repository is created if missing.
        token: for the hub; None: from the environment or an earlier login.
        model_card: written as README.md, unless the folder has one.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    from huggingface_hub import HfApi

    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"model_path={model_path!r}: there is no such folder")
    if model_card is not None and (folder / CARD_BASE_NAME).exists():
        logger.warning("%s is kept; remove it to write a card from model_card", folder / CARD_BASE_NAME)
    elif model_card is not None:
        card = generate_model_card(config=model_card, repo_id=repo_id, model_path=str(folder))
        write_text(folder / CARD_BASE_NAME, str(card))
    hub = HfApi(token=token)
    hub.create_repo(repo_id=repo_id, repo_type="model", private=private, exist_ok=True)
    hub.upload_folder(folder_path=str(folder), repo_id=repo_id, repo_type="model")
    return f"{hub.endpoint}/{repo_id}"
