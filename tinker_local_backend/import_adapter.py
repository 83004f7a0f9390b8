"""Import an adapter from the hosted service or from PEFT into the home, to sample from it and to train it further.

    python -m tinker_local_backend.import_adapter adapter=FOLDER base_model=Qwen/Qwen3-30B-A3B

FOLDER holds adapter_config.json and adapter_model.safetensors, as a downloaded archive does. The adapter must cover the same
modules as the engine's adapters: all linears of attention, of MLPs or the head, and the routed experts of every layer or of none.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import chz
import torch

from tinker_local_backend.command import parse, run
from tinker_local_backend.engine.model.refusals import check_model_name
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.errors import CheckpointError
from tinker_local_backend.storage.checkpoints import save
from tinker_local_backend.storage.foreign_adapters import read_adapter
from tinker_local_backend.storage.paths import CheckpointPath, check_name, check_writable, local_home


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.import_adapter`."""

    adapter: str = chz.field(doc="folder with adapter_config.json and adapter_model.safetensors")
    base_model: str = chz.field(doc="directory or hub id of the model that the adapter was trained on")
    name: str = chz.field(default="imported", doc="name of the checkpoints")


def import_adapter(
    adapter: str | Path, base_model: str, name: str = "imported", home: Path | None = None
) -> tuple[str, str]:
    """Save the adapter as a new run of `home`; returns the paths to train from (without an optimizer) and to sample from.

    Raises:
        CheckpointError: it is missing or damaged, does not fit the model, or covers only some modules of the engine's adapters.
        ModelLoadError: no such model.
    """
    folder, home = Path(adapter).expanduser(), home or local_home()
    check_name(name, "checkpoint name")
    check_model_name(base_model)
    check_writable(home)
    source = read_adapter(folder, base_model)
    model = load_model(base_model)
    parts = {model.linears[key].part for key in source.a if key in model.linears} | (
        {"mlp"} if source.experts else set()
    )
    flags = {f"train_{part}": part in parts for part in ("attn", "mlp", "unembed")}
    target = model.targets.new_adapter(replace(source.spec, **flags), 0, torch.device("cpu"))
    for table, ours in ((source.a, target.a), (source.b, target.b)):
        ours_shapes, shapes = ({key: tuple(t.shape) for key, t in one.items()} for one in (ours, table))
        if ours_shapes != shapes:
            key = min(key for key in ours.keys() | table.keys() if ours_shapes.get(key) != shapes.get(key))
            raise CheckpointError(
                f"the adapter in {folder} cannot be trained further here: {key} has the shape {shapes.get(key)}, in an adapter "
                f"of the engine {ours_shapes.get(key)} (None: no such matrix); `python -m tinker_local_backend.merge` accepts it"
            )
    with torch.no_grad():
        for table, ours in ((source.a, target.a), (source.b, target.b)):
            for key, matrix in ours.items():
                matrix.copy_(table[key])
    run_id = f"imported-{uuid.uuid4().hex[:12]}"
    state, sampler = CheckpointPath(run_id, "weights", name), CheckpointPath(run_id, "sampler_weights", name)
    for path in (state, sampler):
        save(home, path, base_model, target, None, None, overwrite=False, user_metadata={})
    return str(state), str(sampler)


def main(config: Config) -> None:
    state, sampler = import_adapter(config.adapter, config.base_model, config.name)
    print(f"to train further: {state}\nto sample from: {sampler}")


if __name__ == "__main__":
    run(main, parse(Config))
