"""What the kernels take of a GPU at the shapes of real models: shared memory, registers, tensor cores, loads ahead."""

import re
from typing import Any

import pytest
import torch
from torch._library.custom_ops import CustomOpDef

from benchmarks import roofline
from tests.compiled import launches, resources
from tests.compiled.cases import CASES, KERNELS, Case
from tests.compiled.launches import Launch
from tinker_local_backend.engine.cuda import ops

pytestmark = pytest.mark.compiled


def compiled(case: Case, capability: int) -> list[Launch]:
    found: list[Launch] = []
    with launches.compiled_for(capability, found.append):
        case.error(launches.launchers())
    return found


def multiplies_halves(launch: Launch) -> bool:
    dtypes = {value.dtype for value in launch.arguments.values() if isinstance(value, torch.Tensor)}
    return "tl.dot(" in launch.source and torch.bfloat16 in dtypes


def test_every_kernel_has_an_entry() -> None:
    assert set(KERNELS) == set(launches.kernels())


def test_every_kernel_is_launched_by_a_case(capability: int) -> None:
    found = {launch.kernel for case in CASES.values() for launch in compiled(case, capability)}
    assert found == set(KERNELS)


class Noted:
    """Notes which of the launchers are asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._launchers = launches.launchers()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._launchers, name)


def test_every_operation_is_called_by_a_case() -> None:
    noted: Any = Noted()
    with launches.compiled_for(90, lambda launch: None):
        for case in CASES.values():
            case.error(noted)
    assert {name for name, value in vars(ops).items() if isinstance(value, CustomOpDef)} <= noted.names


@pytest.mark.parametrize("name", CASES)
def test_a_block_has_enough_shared_memory_and_registers(name: str, capability: int) -> None:
    wrong = []
    for launch in compiled(CASES[name], capability):
        if launch.shared > KERNELS[launch.kernel].shared_bytes:
            wrong.append(f"{launch.label}: {launch.shared} bytes of shared memory")
        if spilled := resources.count(launch, resources.LOCAL_MEMORY):
            wrong.append(f"{launch.label}: {spilled} instructions for registers that were spilled")
    assert wrong == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.bfloat16])
def test_bfloat16_products_run_on_tensor_cores(name: str, capability: int) -> None:
    for launch in compiled(CASES[name], capability):
        used = resources.count(launch, resources.TENSOR_CORES)
        assert (used > 0) == multiplies_halves(launch), f"{launch.label}: {used} instructions"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.bfloat16])
def test_a_loop_over_products_loads_ahead(name: str, capability: int) -> None:
    """A wait for all copies in each turn would leave the memory idle while the matrices are multiplied."""
    for launch in compiled(CASES[name], capability):
        waits = resources.waits_in_loops(launch)
        if KERNELS[launch.kernel].waits_for_all:
            continue
        assert waits or not KERNELS[launch.kernel].pipelined, f"{launch.label}: no loop with products waits for copies"
        assert min(waits, default=1) > 0, (
            f"{launch.label}: its loop waits until {waits} groups of copies are on their way"
        )


def test_the_disassembler_finds_spilled_registers() -> None:
    assert len(re.findall(resources.LOCAL_MEMORY, "STL [R1+0x4], R5 ; LDL.64 R2, [R1] ; LDG.E R1, [R2]")) == 2


OPERATIONS = {
    "paged_attention": "one row attends",
    "store_keys": "Qwen3-4B stores",
    "store_heads": "Qwen3-4B's heads go into pages",
    "norm": "Qwen3-4B's norm",
    "lora_add": "rank 32, one row",
}


@pytest.mark.parametrize(("operation", "name"), OPERATIONS.items())
def test_the_arithmetic_of_decoding_knows_how_many_kernels_an_operation_launches(operation: str, name: str) -> None:
    assert len(compiled(CASES[name], 90)) == roofline.LAUNCHES.get(operation, 1)
