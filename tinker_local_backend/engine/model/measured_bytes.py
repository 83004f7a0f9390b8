"""What a token of a training pass takes of a GPU's memory: measured, with the kernels that its passes use."""

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
"""of the two passes whose difference is what a token takes"""

_MEASURED: weakref.WeakKeyDictionary[BaseModel, TokenBytes] = weakref.WeakKeyDictionary()


def measured_token_bytes(model: BaseModel) -> TokenBytes:
    """On a GPU what two passes take, measured once for each model. Elsewhere the estimate of `BaseModel.token_bytes`: on a CPU it
    is a constant, so that runs are reproducible, and a pass of a divided model needs all of its processes."""
    if model.device.type != "cuda" or not model.shards.whole:
        return model.token_bytes()
    if model not in _MEASURED:
        _MEASURED[model] = _measured(model)
    return _MEASURED[model]


def _measured(model: BaseModel) -> TokenBytes:
    try:
        adapter = model.new_adapter(model.widest_spec(8), seed=0)
        kept, recomputed = (_slope(model, adapter, recompute) for recompute in (False, True))
    except ModelLoadError:  # no adapter covers it: it is sampled from only
        return model.token_bytes()
    except Exception as error:
        why = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"
        logger.warning("what a training pass takes could not be measured (%s); it is estimated", why)
        return model.token_bytes()
    return TokenBytes(kept=kept, recomputed=recomputed, beside=0)


def _slope(model: BaseModel, adapter: Adapter, recompute: bool) -> int:
    few, many = TOKENS
    with model.recompute(recompute), model.routed(adapter), torch.inference_mode(False):
        _peak(model, adapter, few)  # compiles kernels, and allocates what libraries keep
        return max(1, (_peak(model, adapter, many) - _peak(model, adapter, few)) // (many - few))


def _peak(model: BaseModel, adapter: Adapter, tokens: int) -> int:
    """Most bytes that a forward and backward pass takes at a time, between the embedding and the head."""
    # Learned positions end at the context: reading beyond them would end the use of the device by this process.
    positions = torch.arange(tokens, device=model.device) % model.context_length
    lengths = [min(model.context_length, tokens - start) for start in range(0, tokens, model.context_length)]
    ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    hidden_TH, backward = model.training_pass(ids, positions, PackedPlan.whole(lengths), adapter)
    backward(torch.ones_like(hidden_TH))
    return torch.cuda.max_memory_allocated(model.device) - before
