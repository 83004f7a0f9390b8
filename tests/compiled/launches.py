"""Launches of Triton kernels on GPUs that are not there: compiled for them by the project's own launchers, and run on the CPU.

Triton asks a driver which GPU it compiles for, and a stub answers. A launch then compiles the kernel as a launch on that GPU
would, for the very arguments; nothing here knows a kernel's arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.compiled import arithmetic, transfers
from tests.compiled.machine import Machine
from tests.compiled.memory import Tensors
from tests.compiled.ptx import Program, parse
from tinker_local_backend.engine import cuda

DECODERS = {**arithmetic.DECODERS, **transfers.DECODERS}
WARP = 32


def _triton(name: str) -> Any:
    """A module of triton, which is not installed where the types are checked."""
    return importlib.import_module(name)


def capabilities() -> tuple[int, ...]:
    """What the installed triton compiles for here: the newest for all, 3.6, which comes with torch 2.11, for an H100."""
    major, minor = (int(part) for part in version("triton").split(".")[:2])
    return (80, 89, 90, 100) if (major, minor) >= (3, 9) else (90,)


class Driver:
    """Answers as a driver on a machine with such a GPU would, as far as compiling needs it."""

    def __init__(self, capability: int) -> None:
        self._target = _triton("triton.backends.compiler").GPUTarget("cuda", capability, WARP)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    source: str
    """the kernel's Python code"""
    capability: int
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """by the kernel's own names"""
    constants: frozenset[str]
    """names of those that are compiled into it"""
    shared: int
    """bytes of shared memory"""
    warps: int
    ptx: str
    cubin: bytes

    @property
    def label(self) -> str:
        return f"{self.kernel} for sm_{self.capability}"

    @cached_property
    def program(self) -> Program:
        return parse(self.ptx)

    def run(self, ptx: str | None = None, changed: Mapping[str, Any] | None = None) -> Tensors:
        """On the CPU, in place. A planted fault is another PTX, or other arguments than those that were given."""
        machine = _machine(ptx or self.ptx, self.shared)
        every = {**self.arguments, **(changed or {})}
        given = [(name, value) for name, value in every.items() if name not in self.constants]
        # Triton appends pointers to scratch memory of its own, which none of these kernels uses.
        scratch = [(parameter, 0) for _, parameter in machine.program.parameters[len(given) :]]
        return machine.run(self.grid, [*given, *scratch])


_machines: dict[tuple[str, int], Machine] = {}


def _machine(ptx: str, shared: int) -> Machine:
    if (ptx, shared) not in _machines:
        _machines[ptx, shared] = Machine(parse(ptx), shared, DECODERS)
    return _machines[ptx, shared]


def _grid(grid: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """A grid may be a function of the arguments."""
    sizes: Any = grid(given) if callable(grid) else grid
    return tuple(sizes)


@contextmanager
def compiled_for(capability: int, then: Callable[[Launch], None]) -> Iterator[None]:
    """Every launch inside is compiled for this capability and handed to `then` instead of to a GPU."""
    jit = _triton("triton.runtime.jit").JITFunction
    driver = _triton("triton.runtime").driver
    compile_only = jit.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **named)
        options = {name: value for name, value in named.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        constants = frozenset(name for name, kind in compiled.src.signature.items() if kind == "constexpr")
        then(
            Launch(
                self.__name__,
                self.src,
                capability,
                _grid(grid, given),
                given,
                constants,
                compiled.metadata.shared,
                compiled.metadata.num_warps,
                compiled.asm["ptx"],
                compiled.asm["cubin"],
            )
        )
        return compiled

    before = getattr(driver, "_active", None)
    driver.set_active(Driver(capability))
    try:
        with patch.object(jit, "run", run):
            yield
    finally:
        driver._active = before


@contextmanager
def executed_for(capability: int) -> Iterator[list[tuple[Launch, Tensors]]]:
    """The same, with every launch run on the CPU; also gives what was launched and which bytes it moved."""
    launched: list[tuple[Launch, Tensors]] = []
    with compiled_for(capability, lambda launch: launched.append((launch, launch.run()))):
        yield launched


def modules() -> list[Any]:
    """Every module of kernels."""
    folder = Path(cuda.__file__).parent
    return [importlib.import_module(f"{cuda.__name__}.{path.stem}") for path in sorted(folder.glob("*_kernels.py"))]


def launchers() -> SimpleNamespace:
    """The functions of these modules that launch kernels, by their names."""
    found = {
        name: value
        for module in modules()
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    return SimpleNamespace(**found)


def kernels() -> dict[str, str]:
    """Name and Python code of every kernel that something launches, not of functions that kernels call."""
    jit = _triton("triton.runtime.jit").JITFunction
    found = {name: value.src for module in modules() for name, value in vars(module).items() if isinstance(value, jit)}
    return {
        name: source
        for name, source in found.items()
        if not any(f"{name}(" in other for of, other in found.items() if of != name)
    }
