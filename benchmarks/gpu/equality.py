"""Effect of each part of the CUDA path on logprobs and gradients, compared with a masked float64 model.

python -m benchmarks.gpu only=equality
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import tinker
import torch

from benchmarks.gpu.case import Case, Float64, gradient_errors, open_case
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.stand_ins import graphs_for
from benchmarks.gpu.training_checks import policy_or_weights, take_gradients
from benchmarks.gpu.visit import Visit
from benchmarks.reference import loss_and_gradients
from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import ATTENTION, DECODING, FUSED, LAYERS, PARTS, CudaExecution
from tinker_local_backend.engine.model.attention import Execution, Reference
from tinker_local_backend.engine.model.base_model import BaseModel

REFERENCE = "reference: plain torch"
WAYS: Mapping[str, Sequence[str]] = {
    REFERENCE: (),
    "captured steps": (DECODING,),
    "one attention call for all sequences": (ATTENTION,),
    "fused norms, rotary positions, SwiGLU": tuple(FUSED),
    "joined layers": (LAYERS,),
    "all parts": PARTS,
}
"""Row of the table -> the parts that are on."""

TOKENS, SAMPLES, TEMPERATURE = 24, 2, 0.8
MOST_OTHER_TOKENS = 0.1
"""Share of sequences in which a token may differ from the reference's, in float32; in bfloat16 rounding often flips tokens."""


@dataclass(frozen=True)
class Results:
    """Results with one set of parts: sampled tokens and logprobs, the trainer's logprobs, and its gradients by matrix."""

    tokens: list[list[int]]
    sampled: list[np.ndarray]
    trained: np.ndarray
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """The reference in float64."""

    sampled: Callable[[Sequence[Sequence[int]]], list[np.ndarray]]
    """logprobs of completions, in the order of `Results.tokens`"""
    trained: np.ndarray
    gradients: dict[str, np.ndarray]


def run(visit: Visit) -> None:
    """Compare on a random model, in float32 and in bfloat16."""
    add = visit.findings.table(
        "Equality: differences from the masked float64 model on the CPU, which has the same (rounded) weights",
        ["dtype", "what runs", "sampled logprobs: mean |d|", "largest", "trained logprobs: mean |d|", "largest",
         "gradient, worst matrix", "sequences as the reference draws them"],
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        truth: Truth | None = None
        plain: Results | None = None
        name = str(dtype).removeprefix("torch.")
        for way, parts in WAYS.items():
            if visit.findings.time_is_up:
                visit.findings.leave_out(f"equality: {name}, {way}")
                continue
            with visit.findings.guarded(f"equality: {name}, {way}"), _opened(visit, dtype, parts) as case:
                truth = truth or _truth(case)
                results = _results(case)
                plain = plain or results
                add([name, way, *_row(visit.findings, f"{name}, {way}", case, results, truth, plain)])
            visit.free()


@contextmanager
def _opened(visit: Visit, dtype: torch.dtype, parts: Sequence[str]) -> Iterator[Case]:
    """A case whose model runs these parts, without the checks at start."""

    def start(model: BaseModel) -> Execution:
        off = {part: "not in this row" for part in PARTS if part not in parts}
        return CudaExecution(model, graphs_for(model.device), off) if parts else Reference()

    discarded = Findings("equality")  # findings of `Case` itself
    with (
        mock.patch.object(models, "start", start),
        open_case("random", visit.scale, visit.device, dtype, visit.rank, discarded) as case,
    ):
        yield case


def _data(case: Case) -> list[tinker.Datum]:
    return policy_or_weights("cross_entropy", min(case.model.vocab_size, 1500))


def _results(case: Case) -> Results:
    params = tinker.SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, seed=7, stop=[])
    sampler = case.sampler()
    futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in case.prompts]
    sequences = [sequence for future in futures for sequence in future.result().sequences]
    output = case.training.forward_backward(_data(case), "cross_entropy").result()
    trained = np.concatenate([record["logprobs"].to_numpy() for record in output.loss_fn_outputs])
    sampled = [np.array(sequence.logprobs, dtype=np.float64) for sequence in sequences]
    return Results([list(sequence.tokens) for sequence in sequences], sampled, trained, take_gradients(case))


def _truth(case: Case) -> Truth:
    reference = Float64(case)
    adapter, scale = reference.adapter_of(case.training), case.adapter.spec.scale
    prompts = [prompt for prompt in case.prompts for _ in range(SAMPLES)]
    _, logprobs, gradients = loss_and_gradients(reference, case.training, _data(case), "cross_entropy")

    def sampled(completions: Sequence[Sequence[int]]) -> list[np.ndarray]:
        pairs = zip(prompts, completions, strict=True)
        return [reference.completion_logprobs(p, tokens, adapter, scale, TEMPERATURE) for p, tokens in pairs]

    return Truth(sampled, np.concatenate(logprobs), gradients)


def _row(findings: Findings, name: str, case: Case, results: Results, truth: Truth, plain: Results) -> list[str]:
    sampled = np.abs(np.concatenate(results.sampled) - np.concatenate(truth.sampled(results.tokens)))
    trained = np.abs(results.trained - truth.trained)
    limit = case.tolerance
    for what, difference in (("sampled", sampled), ("trained", trained)):
        findings.check(f"equality: {name}: {what} logprobs, mean", float(difference.mean()), limit.mean)
        if np.isfinite(limit.largest):
            findings.check(f"equality: {name}: {what} logprobs, largest", float(difference.max()), limit.largest)
    gradient = float(np.max(list(gradient_errors(results.gradients, truth.gradients).values())))  # NaN stays
    findings.check(f"equality: {name}: gradient", gradient, limit.gradient)
    same = sum(mine == theirs for mine, theirs in zip(results.tokens, plain.tokens, strict=True))
    if case.model.dtype == torch.float32:
        other = 1 - same / len(results.tokens)
        findings.check(f"equality: {name}: sequences with other tokens", other, MOST_OTHER_TOKENS)
    numbers = (sampled.mean(), sampled.max(), trained.mean(), trained.max(), gradient)
    return [*(f"{number:.1e}" for number in numbers), f"{same} of {len(results.tokens)}"]
