"""Save and load checkpoints: adapters in PEFT's format, optimizer state and gradients. A folder is whole or absent.

It holds adapter_config.json and adapter_model.safetensors (which PEFT, transformers and vLLM load), checkpoint.json (info.py)
and, for `weights`, optimizer.safetensors, and gradients.safetensors if gradients are pending.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes

from tinker_local_backend.engine.model.expert_matrices import by_tensor, from_peft, peft_path
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.training.optimizer import AdamW
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage.adapter_forms import PEFT_PREFIX, ExpertForm, in_form, plain_config
from tinker_local_backend.storage.catalog import record, remove_expired
from tinker_local_backend.storage.encryption import SUFFIX, Recipients
from tinker_local_backend.storage.files import recover, staging_folder, write_json, writing
from tinker_local_backend.storage.info import ADAPTER_FILE, CONFIG_FILE, INFO_FILE, CheckpointInfo, expiry, info_in
from tinker_local_backend.storage.paths import CheckpointPath

QUANTIZATION = "quantization"
"""key in the adapter file's metadata: the value of TINKER_LOCAL_QUANTIZATION in training"""
OPTIMIZER_FILE, GRADIENT_FILE = "optimizer.safetensors", "gradients.safetensors"


def save(
    home: Path,
    path: CheckpointPath,
    base_model: str,
    adapter: Adapter,
    optimizer: AdamW | None,
    ttl_seconds: int | None,
    overwrite: bool,
    user_metadata: dict[str, str],
    gradients: Sequence[torch.Tensor] | None = None,
    recipients: Recipients | None = None,
) -> None:
    """Write a checkpoint to a temporary folder, sync it, and rename it into place. `gradients`: pending for the next step.
    With recipients the adapter's files are encrypted, with names that end in .age; nothing is written unencrypted.

    Raises:
        RequestError: the name is taken and `overwrite` is False, the ttl is not positive, or a link leads out of the home.
        CheckpointWriteError: a write failed; an earlier checkpoint of this name is intact.
    """
    now = time.time()
    info = CheckpointInfo(
        base_model=base_model,
        spec=adapter.spec,
        created=now,
        expires_at=expiry(ttl_seconds, now),
        user_metadata=user_metadata,
        optimizer_steps=None if optimizer is None else optimizer.steps,
    )
    target = path.folder(home)
    remove_expired(home, path.run_id)
    recover(target)
    if os.path.lexists(target) and not overwrite:
        raise RequestError(f"checkpoint {path} exists; choose another name or pass overwrite=True")
    named = dict(adapter.named_parameters())
    with writing(f"checkpoint {path}"), staging_folder(target) as staging:
        _write(staging, adapter, base_model, recipients=recipients)
        if optimizer is not None:
            save_file(optimizer.state_tensors(list(named)), staging / OPTIMIZER_FILE)
        if gradients is not None:
            tensors = {name: part.contiguous() for name, part in zip(named, gradients, strict=True)}
            save_file(tensors, staging / GRADIENT_FILE)
        files = (ADAPTER_FILE, OPTIMIZER_FILE, GRADIENT_FILE)
        sums = {name: _sha256(staging / name) for name in files if (staging / name).exists()}
        info = replace(info, sha256=sums)
        write_json(staging / INFO_FILE, info.to_json())
    record(home, path, info)


def write_adapter(folder: Path, adapter: Adapter, base_model: str, form: ExpertForm = "peft") -> None:
    """Write a folder with only the adapter. Raises CheckpointWriteError if a write fails."""
    with writing(f"adapter {folder.name}"), staging_folder(folder) as staging:
        _write(staging, adapter, base_model, form)


def _write(
    folder: Path, adapter: Adapter, base_model: str, form: ExpertForm = "peft", recipients: Recipients | None = None
) -> None:
    linears = {name: matrix.detach() for name, matrix in _linear_matrices(adapter).items()}
    with torch.no_grad():
        named = {**linears, **in_form(form, adapter.experts, (adapter.a, adapter.b))}
    tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in named.items()}
    config, metadata = peft_config(adapter, base_model), {"format": "pt"}
    if adapter.quantization is not None:
        metadata[QUANTIZATION] = adapter.quantization
    if form != "peft" and adapter.experts:
        config = plain_config(config, tensors)
    if recipients is None:
        save_file(tensors, folder / ADAPTER_FILE, metadata=metadata)
        write_json(folder / CONFIG_FILE, config)
        return
    for name, plain in ((ADAPTER_FILE, to_bytes(tensors, metadata)), (CONFIG_FILE, json.dumps(config).encode())):
        (folder / f"{name}{SUFFIX}").write_bytes(recipients.encrypt(plain))


def _linear_matrices(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The matrices of linears by their names in PEFT, without routed experts, whose names differ there."""
    routed = {f"{matrix.name}.lora_{factor}.weight" for matrix in adapter.experts for factor in "AB"}
    return {name: matrix for name, matrix in adapter.named_parameters() if name not in routed}


def peft_config(adapter: Adapter, base_model: str) -> dict[str, object]:
    """adapter_config.json: the fields that PEFT needs to rebuild the same function."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": adapter.names.fan_in_fan_out,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": list(adapter.names.modules),
    }
    if adapter.names.parameters:
        config["target_parameters"] = list(adapter.names.parameters)
    if any(
        len(group) > 1 for group in by_tensor(adapter.experts)
    ):  # gate and up: one matrix of twice the rank, and the same scale
        config["rank_pattern"] = {r".*\.gate_up_proj": 2 * adapter.spec.rank}
        config["alpha_pattern"] = {r".*\.gate_up_proj": 2 * adapter.spec.alpha}
    return config


def load_adapter(home: Path, path: CheckpointPath, target: Adapter) -> None:
    """Copy a checkpoint's matrices into `target`, which must have the same modules and shapes."""
    tensors = _load_tensors(path.folder(home) / ADAPTER_FILE, path)
    saved = made_quantization(path.folder(home) / ADAPTER_FILE)
    if saved != target.quantization:
        fix = "unset TINKER_LOCAL_QUANTIZATION" if saved is None else f"set TINKER_LOCAL_QUANTIZATION={saved}"
        raise CheckpointError(
            f"checkpoint {path} was trained on a base model with {saved or 'its own'} weights, and this one has "
            f"{target.quantization or 'its own'}: {fix}"
        )
    expected = _linear_matrices(target)
    loaded = _with_current_names({name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}, expected)
    of_experts = {f"{peft_path(matrix)}.lora_{factor}.weight" for matrix in target.experts for factor in "AB"}
    if expected.keys() | of_experts != loaded.keys():
        difference = sorted((expected.keys() | of_experts) ^ loaded.keys())[:4]
        raise CheckpointError(f"checkpoint {path} does not fit the base model: it differs in {difference}")
    for name, matrix in expected.items():
        if matrix.shape != loaded[name].shape:
            raise CheckpointError(
                f"checkpoint {path}: {name} has shape {tuple(loaded[name].shape)}, expected {tuple(matrix.shape)}"
            )
    try:
        experts = from_peft(target.experts, target.spec.rank, loaded)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} does not have the layout {target.spec.experts}: {error}") from error
    _check_unchanged(path.folder(home) / ADAPTER_FILE, path)
    with torch.no_grad():
        for name, matrix in expected.items():
            matrix.copy_(loaded[name])
        for matrices, saved_matrices in zip((target.a, target.b), experts, strict=True):
            for name, matrix in saved_matrices.items():
                matrices[name].copy_(matrix)


def made_quantization(file: Path) -> str | None:
    """Format to which TINKER_LOCAL_QUANTIZATION quantised the base weights that an adapter was trained on; None: none."""
    with safe_open(file, framework="pt") as opened:
        return (opened.metadata() or {}).get(QUANTIZATION)


def load_optimizer(home: Path, path: CheckpointPath, adapter: Adapter, optimizer: AdamW) -> None:
    """Restore the optimizer's moments. Raises CheckpointError if the checkpoint was saved without them."""
    file = path.folder(home) / OPTIMIZER_FILE
    if not file.exists():
        raise CheckpointError(
            f"checkpoint {path} holds no optimizer state (it was saved for sampling); load it without the optimizer"
        )
    try:
        names = [name for name, _ in adapter.named_parameters()]
        optimizer.load_state_tensors(names, _with_current_names(_load_tensors(file, path), names))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    _check_unchanged(file, path)


def load_gradients(home: Path, path: CheckpointPath, adapter: Adapter) -> list[torch.Tensor] | None:
    """The gradients that were pending at saving, in the order of the adapter's matrices; None if there were none."""
    file = path.folder(home) / GRADIENT_FILE
    if not file.exists():
        return None
    matrices = dict(adapter.named_parameters())
    tensors = _with_current_names(_load_tensors(file, path), matrices)
    if {n: t.shape for n, t in tensors.items()} != {name: matrix.shape for name, matrix in matrices.items()}:
        raise CheckpointError(f"checkpoint {path}: {file.name} does not fit the adapter")
    _check_unchanged(file, path)
    return [tensors[name].to(matrix.device) for name, matrix in matrices.items()]


_TEXT_ONLY, _WITH_TOWER = "model.layers.", "model.language_model.layers."


def _with_current_names(tensors: dict[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors by the current names of a model's matrices: earlier versions loaded Qwen3.5 without its vision tower."""
    if not any(name.startswith(_WITH_TOWER) for name in names):
        return tensors
    return {
        name if _WITH_TOWER in name else name.replace(_TEXT_ONLY, _WITH_TOWER, 1): tensor
        for name, tensor in tensors.items()
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_sums(folder: Path, path: CheckpointPath) -> None:
    """Raise CheckpointError unless a checkpoint's folder has every saved tensor file, unchanged."""
    for name in info_in(folder, path).sha256:
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {path} lacks {name}")
        _check_unchanged(folder / name, path)


def _check_unchanged(file: Path, path: CheckpointPath) -> None:
    """Raise CheckpointError unless the file has the checksum recorded at saving."""
    expected = info_in(file.parent, path).sha256.get(file.name)
    if expected is not None and _sha256(file) != expected:
        raise CheckpointError(
            f"checkpoint {path}: {file.name} is damaged (its checksum differs from the one in {INFO_FILE}); continue from "
            "another checkpoint, or copy this one again from its source"
        )


def _load_tensors(file: Path, path: CheckpointPath) -> dict[str, torch.Tensor]:
    if file.is_symlink():
        raise CheckpointError(f"checkpoint {path}: {file.name} is a symbolic link; put the file itself there")
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} lacks {file.name}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} is damaged ({error})") from error
