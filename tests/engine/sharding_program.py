"""What test_sharding.py runs in two processes that share a base model: who holds what, unequal work, and what goes wrong.

WORLD_SIZE=2 RANK=0 ... python -m tests.engine.sharding_program RESULTS [MODEL]

With a model, it only trains and samples with that one.
"""

import gc
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.engine.direct import Direct, request
from tests.engine.helpers import cross_entropy_datum, policy_datum, random_tokens
from tests.waiting import HANG_SECONDS
from tinker_local_backend.engine.model import attention
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.sharding import Ranks, Step
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.sampler import SamplingResult
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.trainer import finish
from tinker_local_backend.errors import LocalBackendError, ReplicaError

MODEL = "example_data/tiny_chat"
WORK = ([(5, 40), (12,), (9, 9, 9)], [(30,)])
"""Lengths of the datums of each call, by rank."""


def new_state(model: BaseModel) -> trainer.TrainState:
    """An adapter that changes every logit."""
    adapter = model.new_adapter(LoraSpec(4), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(adapter.b):
            adapter.b[name].copy_(torch.randn(adapter.b[name].shape, generator=generator) * 0.05)
    return trainer.TrainState.new(adapter)


def train(model: BaseModel, state: trainer.TrainState, lengths: tuple[int, ...]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one call."""
    data = [cross_entropy_datum(n, n) for n in lengths]
    output = finish(trainer.forward_backward(model, state, data, "cross_entropy", None, backward=True))
    gradients = [gradient.clone() for gradient in state.gradients or []]
    state.clear()
    return output.metrics["loss:sum"], gradients


def sample(model: BaseModel) -> list[SamplingResult]:
    """Three prompts at once, and then their continuations, which go on from what is cached."""
    state, direct = new_state(model), Direct(model)
    adapter, results = state.adapter.snapshot(model.dtype), []
    for more in ([], [5, 6, 7]):
        requests = [request([*random_tokens(20 + i, i), *more], adapter, max_tokens=8, seed=i) for i in range(3)]
        results.extend(direct.run(*requests))
    return results


def held() -> int:
    """Bytes of all tensors of this process that are large enough to be weights of a layer."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            tensor = thing.to_local() if isinstance(thing, DTensor) else thing
            if not tensor.is_meta and tensor.untyped_storage().nbytes() > 10_000:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _memory(model: BaseModel) -> dict[str, Any]:
    """What there is of the weights between turns, and at most during a pass."""
    sizes = {name: parameter.numel() * parameter.itemsize for name, parameter in model.module.named_parameters()}
    gc.collect()
    found: dict[str, Any] = {"whole": sum(sizes.values()), "between": held(), "during": []}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    found |= {"layer": layer, "rest": sum(size for name, size in sizes.items() if ".layers." not in name)}

    def watch(*_: object) -> None:
        found["during"].append(held())

    handles = [module.register_forward_hook(watch) for module in model._layers]
    with model.shards.turn():
        train(model, state := new_state(model), (4,))
    for handle in handles:
        handle.remove()
    del state
    gc.collect()
    found["after"] = held()
    return found


def _error_in_a_pass(model: BaseModel, rank: int) -> tuple[str, float]:
    """Rank 1 fails in its third layer, and then does the same work again."""
    state, error = new_state(model), ""
    attend, calls = attention.PackedPlan.attend, 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("in the third layer")
        return attend(*arguments)

    attention.PackedPlan.attend = failing if rank == 1 else attend  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with model.shards.turn():
            train(model, state, (20,))
    except ValueError as raised:
        error = str(raised)
    attention.PackedPlan.attend = attend
    with model.shards.turn():
        loss, _ = train(model, state, (20,))
    return error, loss


def _forward_alone(model: BaseModel, rank: int) -> dict[str, float]:
    """Rank 0 has a pass without gradients, a head alone to train, and a pass that is recomputed; rank 1 rests."""
    with model.shards.turn():
        if rank == 1:
            return {}
        state, data = new_state(model), [policy_datum(9, 9)]
        output = finish(trainer.forward_backward(model, state, data, "ppo", None, backward=False))
        with model.recompute(True):
            hidden = trainer.forward_backward(model, state, data, "ppo", None, backward=True)
            finish(hidden)
    return output.metrics


def _failing_load(ranks: Ranks, rank: int) -> str:
    name = MODEL if rank == 0 else "no/such/folder"
    try:
        load_model(name, ranks=ranks)
    except LocalBackendError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _gone(model: BaseModel, ranks: Ranks, rank: int) -> tuple[str, str]:
    """Rank 1 dies in the middle of a pass of rank 0, which is told then and at once ever after."""
    if rank == 1:
        with model.shards.turn():
            ranks.agree(Step.FORWARD)
            os._exit(3)
    found = []
    for _ in range(2):
        try:
            with model.shards.turn():
                train(model, new_state(model), (20,))
        except ReplicaError as error:
            found.append(str(error))
    return found[0], found[1]


def _train_and_sample(name: str, ranks: Ranks, rank: int) -> dict[str, Any]:
    """Unequal work of both ranks; rank 0 samples too."""
    model = load_model(name, ranks=ranks)
    with model.shards.turn():
        work = [train(model, new_state(model), lengths) for lengths in WORK[rank]]
        samples = sample(model) if rank == 0 else []
    return {"work": work, "samples": [(r.cached_tokens, *r.sequences) for r in samples]}


def main(results: str, other: str | None = None) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_SECONDS))
    ranks = Ranks(torch.device("cpu"), lambda error: ReplicaError(f"gone: {type(error).__name__}"))
    if other is not None:
        Path(f"{results}{rank}").write_bytes(pickle.dumps(_train_and_sample(other, ranks, rank)))
        return
    found: dict[str, Any] = {"failing_load": _failing_load(ranks, rank)}
    model = load_model(MODEL, ranks=ranks)
    found["memory"] = _memory(model)
    with model.shards.turn():
        found["work"] = [train(model, new_state(model), lengths) for lengths in WORK[rank]]
    found["error"] = _error_in_a_pass(model, rank)
    found["metrics"] = _forward_alone(model, rank)
    try:
        train(model, new_state(model), (3,))
    except RuntimeError as error:
        found["outside"] = str(error)
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    found["gone"] = _gone(model, ranks, rank)
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
