"""What a captured step computes, by whether a row's bits may depend on other rows; docs/gpu.md says the same."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._library.custom_ops import CustomOpDef

from benchmarks.gpu.models import random_module
from benchmarks.gpu.stand_ins import graphs_for
from benchmarks.models import SHAPES, word_tokenizer
from tests.engine.cuda.test_decoder import Launches
from tinker_local_backend.engine.cuda import ops
from tinker_local_backend.engine.cuda.adapter_slots import AdapterSlots
from tinker_local_backend.engine.cuda.decoder import BURST, Decoder
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.step import DecodeRow, StepState, decode_step
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import adopt_module
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.token_choice import ONE_STAGE

CPU = torch.device("cpu")
SECTION = (
    (Path(__file__).parents[3] / "docs" / "gpu.md")
    .read_text()
    .partition("### What holds to the bit")[2]
    .partition("\n###")[0]
)

BY_ROWS = {"linear", "softmax", "sum", "cumsum", "argmax"}
"""A library may compute a row in another way where there are more rows."""

PRODUCTS = {"linear", "_linear_pointwise", "matmul", "mm", "addmm"}
"""Names that versions of torch and processors have for `linear`."""

ELEMENTWISE = {
    *("__and__", "__or__", "__rshift__", "__xor__", "add", "add_", "cat", "clamp", "copy_", "cos", "div", "embedding", "gather"),
    *("ge", "index_copy_", "log", "lt", "masked_fill", "mul", "neg", "searchsorted", "sin", "stack", "sub", "where"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> BaseModel:
    """With a vocabulary that is searched in two stages, as real ones are."""
    shape = replace(SHAPES["tiny"], vocab=2 * ONE_STAGE)
    made = adopt_module("random/tiny", random_module(shape, CPU, torch.float32), word_tokenizer(shape.vocab))
    made.execution = CudaExecution(made, graphs_for(CPU))
    return made


def described(line: str) -> set[str]:
    """Names in the first cell of the row of the page's table that begins so."""
    row = next(row for row in SECTION.splitlines() if row.startswith(f"| {line}"))
    return set(re.findall(r"`(\w+)`", row.split("|")[1]))


@torch.inference_mode()
def test_the_page_names_every_operation_of_a_step_that_may_depend_on_other_rows(model: BaseModel) -> None:
    slots = AdapterSlots(model.products, model.dtype, CPU, model.targets)
    slots.fit([model.new_adapter(model.widest_spec(4), 0)])
    cache, state = model.new_cache(16), StepState(8, 4, 4, CPU)
    with Launches() as launches:
        decode_step(model, cache, state, slots, 8, True)
    operations = {name for name, value in vars(ops).items() if isinstance(value, CustomOpDef)}
    found = {"linear" if name in PRODUCTS else name for name in launches.names - operations - ELEMENTWISE}
    assert found == BY_ROWS == described("`linear`") | described("`softmax`")
    assert {name for name in operations if not name.endswith("backward")} == described("our kernels")


def rows_of(model: BaseModel, count: int) -> list[DecodeRow]:
    limits = [{}, {"top_k": 5}, {"temperature": 0.7}, {"top_p": 0.9}]
    return [
        DecodeRow(
            SamplingRequest((3 + i,), None, 1, BURST, seed=i, **limits[i % 4]),
            3 + i,
            0,
            BURST,
            (i,),
            0,
            seed=i,
            drawn=0,
        )
        for i in range(count)
    ]


@torch.inference_mode()
def test_in_steps_of_one_size_a_row_does_not_depend_on_the_others(model: BaseModel) -> None:
    """Five to eight rows run in a step of eight; what the others hold, and where a row stands, changes no bit of its logprobs."""
    rows, found = rows_of(model, 8), []
    for chosen in (rows, rows[3:], [rows[5], *rows[:4]]):
        decoder = Decoder(model, model.new_cache(16), graphs_for(CPU), 128)
        burst = decoder.run(chosen, BURST)
        found.append({row.seed: (burst.tokens[:, i], burst.logprobs[:, i]) for i, row in enumerate(chosen)})
    for others in found[1:]:
        for seed, (tokens, logprobs) in others.items():
            assert (tokens == found[0][seed][0]).all() and (logprobs == found[0][seed][1]).all(), seed
