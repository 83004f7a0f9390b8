"""GPU memory per token of a training pass, measured with the kernels that passes use."""

from __future__ import annotations

import logging
import weakref

import torch

from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.footprint import TokenBytes
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.errors import ModelLoadError

logger = logging.getLogger(__name__)

TOKENS = 256, 1024
"""of the two passes whose difference gives the bytes per token"""

_MEASURED: weakref.WeakKeyDictionary[BaseModel, TokenBytes] = weakref.WeakKeyDictionary()


def measured_token_bytes(model: BaseModel) -> TokenBytes:
    """On a GPU, measured with two passes, once per model. Elsewhere the estimate `BaseModel.token_bytes`: on a CPU it is
    constant, so that runs are reproducible, and a pass of a sharded model would need all processes.
    """
    if model.device.type != "cuda" or not model.shards.whole:
        return model.token_bytes()
    if model not in _MEASURED:
        _MEASURED[model] = _measured(model)
    return _MEASURED[model]


def _measured(model: BaseModel) -> TokenBytes:
    try:
        adapter = model.new_adapter(model.widest_spec(8), seed=0)
        kept, recomputed = (_slope(model, adapter, recompute) for recompute in (False, True))
    except ModelLoadError:  # adapters do not cover it, so it is not trained
        return model.token_bytes()
    except Exception as error:
        why = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"
        logger.warning("the memory of a training pass could not be measured (%s); it is estimated", why)
        return model.token_bytes()
    return TokenBytes(kept=kept, recomputed=recomputed, transient=0)


def _slope(model: BaseModel, adapter: Adapter, recompute: bool) -> int:
    few, many = TOKENS
    with model.recompute(recompute), model.routed(adapter), torch.inference_mode(False):
        _peak(model, adapter, few)  # warm-up: compiles kernels, and libraries allocate workspaces
        return max(1, (_peak(model, adapter, many) - _peak(model, adapter, few)) // (many - few))


def _peak(model: BaseModel, adapter: Adapter, tokens: int) -> int:
    """Peak bytes of a forward and backward pass, from the embedding to the final norm."""
    # Learned positions end at the context length: an index beyond them would make CUDA unusable in this process.
    positions = torch.arange(tokens, device=model.device) % model.context_length
    lengths = [min(model.context_length, tokens - start) for start in range(0, tokens, model.context_length)]
    ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    hidden_TH, backward = model.training_pass(ids, positions, PackedPlan.whole(lengths), adapter)
    backward(torch.ones_like(hidden_TH))
    return torch.cuda.max_memory_allocated(model.device) - before
