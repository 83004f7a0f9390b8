"""Fake tensors that report a GPU as their device, and modes that refuse operations which only fake tensors would allow."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tinker_local_backend.engine.model.base_model import BaseModel

GPU = torch.device("cuda", 0)


class NoCopies(TorchDispatchMode):
    """Refuses copies between the CPU and the GPU, which fake tensors allow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in args if isinstance(t, torch.Tensor)]
        if func is torch.ops.aten.copy_.default and given[1].device != GPU and given[1].dim():
            raise RuntimeError(f"{func} copies from the CPU to the GPU")
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and any(t.device == GPU for t in given):
            raise RuntimeError(f"{func} copies from the GPU to the CPU")
        return result


class Indexing(TorchFunctionMode):
    """tensor[...], tensor[index] = ..., copy_ and conversions to numbers by dispatcher operations: torch's own versions need the
    device's driver, which a CPU build does not have.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func in (torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.item):
            return torch.ops.aten._local_scalar_dense.default(args[0])
        if func is torch.Tensor.__setitem__ and isinstance(args[1], torch.Tensor):
            return torch.ops.aten.index_put_.default(args[0], [args[1]], args[2])
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        index = index if isinstance(index, tuple) else (index,)
        named = sum(item is not None and item is not Ellipsis for item in index)
        dim = 0
        for item in index:
            if item is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            elif item is Ellipsis:
                dim += args[0].dim() - named
            elif isinstance(item, int):
                tensor = tensor.select(dim, item)
            elif isinstance(item, torch.Tensor):
                assert len(index) == 1
                tensor = tensor.index_select(0, item)
            else:
                start, end, step = item.indices(tensor.shape[dim])
                tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, end), step), dim + 1
        return tensor


@contextlib.contextmanager
def on_a_fake_gpu(model: BaseModel) -> Iterator[None]:
    """Inside the context the model has fake tensors on a GPU, in bfloat16."""

    def fake(module: nn.Module) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                like = torch.empty(parameter.shape, dtype=torch.bfloat16, device=GPU)
                module._parameters[name] = nn.Parameter(like, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)

    with FakeTensorMode(), Indexing(), torch.no_grad():
        joined = [] if model.decoder is None else model.decoder.linears
        for module in (*model.module.modules(), *joined):
            fake(module)
        for layer in [] if model.decoder is None else model.decoder._layers:
            if layer.norm_weight is not None:
                layer.norm_weight = torch.empty(layer.norm_weight.shape, dtype=torch.bfloat16, device=GPU)
        model.device, model.dtype = GPU, torch.bfloat16
        yield
