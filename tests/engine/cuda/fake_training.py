"""Training on a GPU that is not there: forward, backward and optimizer on tensors without data, which cannot be read back.

    LD_PRELOAD=fake_gpu.so python -m tests.engine.cuda.fake_training MODEL [PLANT]

What a call may read is named here (`reads`); anything else that looks at a tensor's numbers raises, and so does a tensor on
the CPU in the midst of the others. PLANT plants one of these.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import tinker
import torch

from benchmarks.fake_gpu import GPU, NoCopies, on_a_fake_gpu
from tests.engine.helpers import datum, random_tokens
from tinker_local_backend.engine.cuda import varlen
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.model import head
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.training import losses, trainer
from tinker_local_backend.engine.training.trainer import finish

STEM = random_tokens(20, seed=1)


def data_for(loss_fn: str) -> list[tinker.Datum]:
    """Two that begin alike, which makes a shared prefix, and one that does not."""
    data = []
    for seed in range(3):
        tokens = [*(STEM if seed < 2 else []), *random_tokens(6 + seed, seed=10 + seed)]
        signal = np.where(np.arange(len(tokens)) % 2, 1.0, 0.0).astype(np.float32)
        inputs: dict[str, Any] = {"target_tokens": np.array(tokens)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = signal
        else:
            inputs |= {"advantages": signal, "logprobs": -signal}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(len(tokens), dtype=np.float32)
        data.append(datum(tokens, **inputs))
    return data


@contextlib.contextmanager
def reads(calls: list[str]) -> Iterator[None]:
    """Within: what may be read of a tensor, once for each pass or call, is told a number and noted."""

    def read(logprobs: torch.Tensor, elementwise: torch.Tensor) -> tuple[np.ndarray, float]:
        calls.append("pass")
        return np.zeros(tuple(logprobs.shape), dtype=np.float32), 0.0

    def noted(what: str, answer: Any) -> Callable[..., Any]:
        return lambda *_: calls.append(what) or answer

    with (
        mock.patch.object(trainer, "_read", read),
        mock.patch.object(trainer, "global_norm", noted("call", 1.0)),
        mock.patch.object(losses.RatioStats, "metrics", noted("ratios", {})),
    ):
        yield


def synchronous_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(scorer: Any, hidden: Any, targets: Any, slope_fn: Any, sloped: Any = None) -> Any:
        return original(scorer, hidden, targets, slope_fn, None)  # the device is asked for the rows with a slope

    return wrong


def gathered_on_the_cpu(rows_TX: torch.Tensor, copies: varlen.Copies) -> torch.Tensor:
    return rows_TX.index_select(0, torch.zeros(len(copies.gathered), dtype=torch.int64))


def copied_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(model: Any, carry_back: Any, gradient: Any, *rest: Any) -> None:
        gradient.hidden = gradient.hidden.cpu().to(GPU)
        original(model, carry_back, gradient, *rest)

    return wrong


PLANTS: Mapping[str, tuple[Any, str, Any]] = {
    "read": (head.Scorer, "logprobs_and_gradient", synchronous_backward(head.Scorer.logprobs_and_gradient)),
    "cpu": (varlen, "gather_rows", gathered_on_the_cpu),
    "copy": (trainer, "backpropagate", copied_gradient(trainer.backpropagate)),
}


def train(model: BaseModel, loss_fn: str, recompute: bool) -> list[str]:
    """A call and a step; returns what was read."""
    adapter = model.new_adapter(LoraSpec(4), 0)
    state = trainer.TrainState.new(adapter)
    original, calls = model.recompute, []
    with reads(calls), NoCopies(), mock.patch.object(model, "recompute", lambda _: original(recompute)):
        finish(trainer.forward_backward(model, state, data_for(loss_fn), loss_fn, None, True))
        gradients = state.gradients
        assert gradients is not None
        for (name, matrix), gradient in zip(adapter.named_parameters(), gradients, strict=True):
            assert (gradient.shape, gradient.dtype, gradient.device) == (matrix.shape, torch.float32, GPU), name
        trainer.optim_step(state, tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=0.5))
    return calls


def main(path: str, plant: str | None = None) -> None:
    model = load_model(path, torch.device("cpu"), torch.float32)
    model.execution = CudaExecution(model)
    attended: list[int] = []
    original = varlen._varlen
    patches = [
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (8 << 30, 8 << 30)),
        mock.patch.object(torch.cuda, "memory_reserved", lambda device=None: 0),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device=None: 0),
        mock.patch.object(varlen, "_varlen", lambda *a, **k: attended.append(len(a[0])) or original(*a, **k)),
    ]
    if plant is not None:
        patches.append(mock.patch.object(*PLANTS[plant]))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(on_a_fake_gpu(model))
        model.execution._device = GPU
        for loss_fn in losses.LOSSES:
            for recompute in (False, True):
                calls = train(model, loss_fn, recompute)
                assert calls == ["pass", "call", "ratios"], (loss_fn, calls)
                print(loss_fn, "recomputed" if recompute else "kept", calls)
    assert attended, "the varlen plan was not used"


if __name__ == "__main__":
    main(*sys.argv[1:])
