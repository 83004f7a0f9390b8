"""A pretended GPU: tensors in CPU memory that report a GPU as their device, and refuse what torch refuses there.

Arithmetic of tensors on different devices, or a NumPy view of a tensor that is not on the CPU, fails only on a GPU. Here it fails
on any machine. Errors below Python, speed and rounding of a real GPU do not show.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _device
from torch.utils import checkpoint as checkpointing

GPU = torch.device("cuda", 0)
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)
_to = torch._C.TensorBase.to


class DeviceMistake(RuntimeError):
    """An operation that would fail on a GPU."""


class OnGpu(torch.Tensor):
    """A tensor on the pretended GPU. Results of operations on it are too, except `cpu()`, `to("cpu")` and numbers."""

    device = property(lambda self: GPU)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("numpy", "__array__"):
            raise DeviceMistake("can't convert a tensor on a GPU to NumPy; use Tensor.cpu() first")
        if name == "cpu":
            return _plain(args[0])
        if name == "to":
            return _moved(*args, **kwargs)
        on_cpu = [t for t in _tensors((args, kwargs)) if not isinstance(t, OnGpu) and t.dim() > 0]
        if on_cpu and name not in ("copy_", "__getitem__", "__get__", "__set__"):  # an index may be on the CPU
            raise DeviceMistake(f"{name} of tensors on the GPU and one of shape {tuple(on_cpu[0].shape)} on the CPU")
        if name == "mm" and "out_dtype" in kwargs:  # a CPU has no such product
            return _wide_product(*args, **kwargs)
        if "device" in kwargs:
            return _made(func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (list, tuple, dict)):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _tensors(part)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _tagged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, OnGpu) else tensor.as_subclass(OnGpu)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == GPU.type


def _made(factory: Callable[..., torch.Tensor], *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """The result of a factory function with a device argument (None: the device of its arguments)."""
    there = _is_gpu(device) or (device is None and any(isinstance(t, OnGpu) for t in _tensors(args)))
    with torch._C.DisableTorchFunctionSubclass():
        made = factory(*args, **kwargs) if there or device is None else factory(*args, device=device, **kwargs)
    return _tagged(made) if there else _plain(made)


def _moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to in all its forms: with a device, a dtype, both, or another tensor."""
    device, rest = kwargs.pop("device", None), []
    for value in args:
        if isinstance(value, torch.Tensor):
            device = value.device
            rest.append(value.dtype)
        elif isinstance(value, (str, torch.device)):
            device = value
        else:
            rest.append(value)
    there = isinstance(tensor, OnGpu) if device is None else _is_gpu(device)
    if not there and device is not None:
        kwargs["device"] = device
    with torch._C.DisableTorchFunctionSubclass():
        moved = _to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        if there != isinstance(tensor, OnGpu) and moved is tensor:
            moved = tensor.clone()  # on another device it would be a copy
    return _tagged(moved) if there else _plain(moved)


def _module_moved(self: nn.Module, device: Any) -> nn.Module:
    """Module.to(device), which keeps shared parameters shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in self.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = moved.setdefault(id(tensor), _moved(tensor.detach(), device))  # pyright: ignore
    return self


def _wide_product(
    left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    product = left.to(out_dtype) @ right.to(out_dtype)
    return product if out is None else out.copy_(product)


@contextmanager
def pretend() -> Iterator[None]:
    """Inside the context torch creates tensors on a pretended `cuda`, in every thread, and the engine runs its reference there,
    because graphs and kernels need a real GPU.
    """
    _device._device_constructors()  # caches the functions that are replaced below
    original_module_to = nn.Module.to

    def module_to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args and isinstance(args[0], (str, torch.device)) and _is_gpu(args[0]):
            return _module_moved(self, args[0])
        return original_module_to(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TINKER_LOCAL_CUDA="eager"))
        for name in FACTORIES:
            stack.enter_context(
                mock.patch.object(torch, name, wraps(getattr(torch, name))(partial(_made, getattr(torch, name))))
            )
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _moved))
        stack.enter_context(mock.patch.object(nn.Module, "to", module_to))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (8 << 30, 8 << 30)))
        for name in ("memory_reserved", "memory_allocated"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda device=None: 0))
        stack.enter_context(mock.patch.object(torch.cuda, "empty_cache", lambda: None))
        stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda device: None))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", lambda: 1))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", lambda device=None: "a pretended GPU"))
        # Checkpointing compares devices below Python, where these tensors are on the CPU.
        without_device = {"default": lambda tensor: (tensor.shape, tensor.dtype)}
        stack.enter_context(mock.patch.object(checkpointing, "_allowed_determinism_checks_to_fns", without_device))
        stack.enter_context(mock.patch.dict(os.environ, TINKER_LOCAL_DEVICE="cuda"))
        yield
