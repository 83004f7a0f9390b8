"""The way of a sampled token's logprob, from the sampler to the loss: where it stops, and in which form it is there."""

import asyncio
import sys
import threading
from array import array
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tinker
import torch

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_local_backend import ServiceClient

TINY_CHAT = Path(__file__).parents[2] / "example_data" / "tiny_chat"


class Stop(NamedTuple):
    """A function that has the logprob in its hands, and what holds it there."""

    file: str
    function: str
    form: str


WAY = [
    Stop("tinker_local_backend/engine/sampling/token_choice.py", "choose", "tensor"),
    Stop("tinker_local_backend/engine/sampling/sampler.py", "append_token", "array"),
    Stop("tinker_local_backend/sampling_client.py", "_sequence", "array"),
    Stop("tinker_cookbook/completers.py", "TinkerTokenCompleter.__call__", "list"),
    Stop("tinker_cookbook/rl/data_processing.py", "trajectory_to_data", "list"),
    Stop("tinker_cookbook/rl/data_processing.py", "trajectory_to_data", "array"),
    Stop("tinker_local_backend/engine/training/datums.py", "check_datum", "array"),
    Stop("tinker_local_backend/engine/training/micro_batch.py", "make_micro_batch", "tensor"),
    Stop("tinker_local_backend/engine/training/losses.py", "importance_sampling", "tensor"),
]


def test_it_stops_at_most_ten_times_and_changes_its_form_at_most_four_times() -> None:
    assert len(WAY) <= 10
    assert sum(before.form != after.form for before, after in pairwise(WAY)) <= 4


def values_in(held: object, depth: int = 3) -> Iterable[tuple[str, np.ndarray]]:
    """What of a function's variables may hold logprobs: (form, values)."""
    if isinstance(held, torch.Tensor):
        if held.is_floating_point():
            yield "tensor", held.detach().double().flatten().numpy()
    elif isinstance(held, np.ndarray | array):
        plain = np.asarray(held)
        if plain.dtype.kind == "f":
            yield "array", plain.astype(np.float64).flatten()
    elif isinstance(held, tinker.TensorData):
        yield from values_in(held.to_numpy())
    elif isinstance(held, list | tuple) and held and all(isinstance(item, float) for item in held):
        yield "list", np.array(held)
    elif depth and isinstance(held, dict):
        for item in held.values():
            yield from values_in(item, depth - 1)
    elif depth and isinstance(held, list | tuple):
        for item in held:
            yield from values_in(item, depth - 1)
    elif depth and hasattr(held, "__dict__") and type(held).__module__.startswith("tinker"):
        yield from values_in(vars(held), depth - 1)


class Watch:
    """Forms of all floating point numbers that the functions of the way had when they returned."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = {}
        self._wanted = {(stop.file, stop.function) for stop in WAY}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if event != "return" or "tinker_" not in frame.f_code.co_filename:
            return
        file = "/".join(Path(frame.f_code.co_filename).parts)
        for wanted in self._wanted:
            if file.endswith(wanted[0]) and frame.f_code.co_qualname == wanted[1]:
                held = [*frame.f_locals.values(), result]
                self.seen.setdefault(wanted, []).extend(found for one in held for found in values_in(one))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_every_stop_has_it_in_the_form_that_is_written_down(tmp_path: Path) -> None:
    watch = Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        with ServiceClient(home=tmp_path / "home") as service:
            training = service.create_lora_training_client(str(TINY_CHAT), rank=2, seed=0).result()
            sampler = training.save_weights_and_get_sampling_client().result()
            prompt = tinker.ModelInput.from_ints([1, 2, 3])
            action = asyncio.run(TinkerTokenCompleter(sampler, max_tokens=5, seed=0)(prompt, []))
            empty = tinker.ModelInput.empty()
            transition = Transition(prompt, action, 1.0, True)
            data = trajectory_to_data(Trajectory([transition], empty), 1.0)
            training.forward_backward([without_mask(datum) for datum in data], "importance_sampling").result()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    for logprob in action.logprobs:
        assert np.float32(logprob) == logprob
        for stop in WAY:
            found = watch.seen.get((stop.file, stop.function), [])
            forms = {form for form, values in found if np.isin(logprob, values)}
            assert stop.form in forms, f"{stop} has {logprob} in {forms or 'no form'}"


def without_mask(datum: tinker.Datum) -> tinker.Datum:
    inputs = {key: value for key, value in datum.loss_fn_inputs.items() if key != "mask"}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
