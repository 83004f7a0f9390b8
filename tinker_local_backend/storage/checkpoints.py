"""Adapters and optimizer state on disk, in PEFT's format, each checkpoint folder whole or absent.

A folder holds adapter_config.json and adapter_model.safetensors (what PEFT, transformers and vLLM load), checkpoint.json
(what the engine needs to know) and, for `weights`, optimizer.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinker_local_backend.engine.lora import Adapter, LoraSpec
from tinker_local_backend.engine.optimizer import AdamW
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage.paths import CheckpointPath

_PEFT_PREFIX = "base_model.model."
ADAPTER_FILE, OPTIMIZER_FILE, INFO_FILE = "adapter_model.safetensors", "optimizer.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """What checkpoint.json says: enough to make a client from the checkpoint alone."""

    base_model: str
    spec: LoraSpec
    created: float
    expires_at: float | None
    user_metadata: dict[str, str]
    optimizer_steps: int | None

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "spec": vars(self.spec)}

    @classmethod
    def from_json(cls, value: dict) -> CheckpointInfo:
        return cls(**{**value, "spec": LoraSpec(**value["spec"])})


def save(
    home: Path,
    path: CheckpointPath,
    base_model: str,
    adapter: Adapter,
    optimizer: AdamW | None,
    ttl_seconds: int | None,
    overwrite: bool,
    user_metadata: Mapping[str, str] | None,
) -> None:
    """Write a checkpoint to a temporary folder, sync it, and rename it into place.

    Raises RequestError when the name is taken and `overwrite` is False, or the ttl is not positive.
    """
    if ttl_seconds is not None and ttl_seconds <= 0:
        raise RequestError(f"ttl_seconds must be positive or None, got {ttl_seconds}")
    target = path.folder(home)
    remove_expired(target.parent)
    if target.exists() and not overwrite:
        raise RequestError(f"checkpoint {path} exists; choose another name or pass overwrite=True")
    target.parent.mkdir(parents=True, exist_ok=True)
    now = time.time()
    info = CheckpointInfo(
        base_model=base_model,
        spec=adapter.spec,
        created=now,
        expires_at=None if ttl_seconds is None else now + ttl_seconds,
        user_metadata=dict(user_metadata or {}),
        optimizer_steps=None if optimizer is None else optimizer.steps,
    )
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=target.parent))
    try:
        names, tensors = [], {}
        for name, tensor in adapter.named_parameters():
            names.append(name)
            tensors[_PEFT_PREFIX + name] = tensor.detach().contiguous()
        save_file(tensors, staging / ADAPTER_FILE, metadata={"format": "pt"})
        _write_json(staging / "adapter_config.json", peft_config(adapter, base_model))
        if optimizer is not None:
            save_file(optimizer.state_tensors(names), staging / OPTIMIZER_FILE)
        _write_json(staging / INFO_FILE, info.to_json())
        for file in staging.iterdir():
            _sync(file)
        _sync(staging)
        staging.chmod(0o755)  # mkdtemp makes it private, but other programs (a vLLM server) read adapters too
        retired = None
        if target.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=target.parent)) / "x"
            os.replace(target, retired)
        try:
            os.replace(staging, target)
        except BaseException:
            if retired is not None:
                os.replace(retired, target)
            raise
        finally:
            if retired is not None:
                shutil.rmtree(retired.parent, ignore_errors=True)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def peft_config(adapter: Adapter, base_model: str) -> dict[str, object]:
    """adapter_config.json: the fields that PEFT needs to rebuild the same function."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.a}),
    }


def read_info(home: Path, path: CheckpointPath) -> CheckpointInfo:
    """Raises CheckpointError when the checkpoint is absent, expired or damaged."""
    folder = path.folder(home)
    try:
        info = CheckpointInfo.from_json(json.loads((folder / INFO_FILE).read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} does not exist under {home} (set TINKER_LOCAL_HOME?)") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}: {INFO_FILE} is damaged ({error})") from error
    if info.expires_at is not None and info.expires_at <= time.time():
        raise CheckpointError(
            f"checkpoint {path} has expired (it was saved with a ttl); go on from another one, such as `final`"
        )
    return info


def load_adapter(home: Path, path: CheckpointPath, target: Adapter) -> None:
    """Copy a checkpoint's matrices into `target`, which must have the same modules and shapes."""
    tensors = _load_tensors(path.folder(home) / ADAPTER_FILE, path)
    expected = dict(target.named_parameters())
    found = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    if expected.keys() != found.keys():
        difference = sorted(expected.keys() ^ found.keys())[:4]
        raise CheckpointError(f"checkpoint {path} does not fit the base model: it differs in {difference}")
    for name, matrix in expected.items():
        if matrix.shape != found[name].shape:
            raise CheckpointError(
                f"checkpoint {path}: {name} has shape {tuple(found[name].shape)}, expected {tuple(matrix.shape)}"
            )
    with torch.no_grad():
        for name, matrix in expected.items():
            matrix.copy_(found[name])


def load_optimizer(home: Path, path: CheckpointPath, adapter: Adapter, optimizer: AdamW) -> None:
    """Restore the optimizer's moments. Raises CheckpointError when the checkpoint was saved without them."""
    file = path.folder(home) / OPTIMIZER_FILE
    if not file.exists():
        raise CheckpointError(
            f"checkpoint {path} holds no optimizer state (it was saved for sampling); load it without the optimizer"
        )
    try:
        optimizer.load_state_tensors([name for name, _ in adapter.named_parameters()], _load_tensors(file, path))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error


def remove_expired(folder: Path) -> None:
    """Delete the expired checkpoints of one kind of one run. A damaged one is left for whoever asks for it."""
    for info_file in folder.glob(f"[!.]*/{INFO_FILE}"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            expires_at = json.loads(info_file.read_text()).get("expires_at")
            if expires_at is not None and expires_at <= time.time():
                shutil.rmtree(info_file.parent, ignore_errors=True)


def _load_tensors(file: Path, path: CheckpointPath) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} lacks {file.name}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} is damaged ({error})") from error


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
