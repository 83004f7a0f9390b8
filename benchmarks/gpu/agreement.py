"""Difference of sampler and trainer logprobs in bfloat16, by depth; one whole GRPO step; profiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import tinker
import torch

from benchmarks.gpu.case import open_case, teacher_forced
from benchmarks.gpu.counting import top_kernels
from benchmarks.gpu.decoding import Cell, is_captured, started
from benchmarks.gpu.marks import AGREEMENT
from benchmarks.gpu.models import fill_adapter, frozen_adapters, random_model, random_module, shape_of
from benchmarks.gpu.training import training_data
from benchmarks.gpu.visit import Visit
from benchmarks.ours import LEARNING_RATE, LocalEngine, policy_data, sample_workload
from benchmarks.report import number
from benchmarks.workload import make_workload, random_tokens
from tinker_local_backend import SamplingClient
from tinker_local_backend.engine.cuda.decoder import BURST
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.trainer import finish

KERNELS = 25
PROMPT_TOKENS = 32
ROUNDED_TOKENS = 256
PROFILED_TURNS = 4
"""generator steps in a profile"""


def run(visit: Visit) -> None:
    """KL on tiny_chat and on the random model, then one GRPO step and two profiles on the random model."""
    findings = visit.findings
    with (
        findings.guarded("sampler against trainer, tiny_chat"),
        open_case("tiny_chat", visit.scale, visit.device, torch.bfloat16, visit.rank, findings) as case,
    ):
        longest = min(visit.scale.agreement_tokens, case.model.context_length - PROMPT_TOKENS)
        kl_by_depth(visit, "tiny_chat", case.engine, case.sampler(), longest, case.model)
        del case  # frees its cache, which takes most of the GPU's memory
    visit.free()
    model = random_model(visit.scale.agreement_shape, visit.device, torch.bfloat16)
    with LocalEngine.of(model, visit.rank) as engine:
        fill_adapter(engine.training._run.state.adapter, seed=1)
        for name, action in (
            ("sampler against trainer, random model", lambda: _random_kl(visit, engine, model)),
            ("transformers alone", lambda: rounding_alone(visit)),
            ("one GRPO step", lambda: grpo_step(visit, engine, model)),
            ("profile of decoding", lambda: profile_decoding(visit, model)),
            ("profile of training", lambda: profile_training(visit, engine, model)),
        ):
            if findings.time_is_up:
                findings.leave_out(name)
                continue
            with findings.guarded(name):
                action()


def _random_kl(visit: Visit, engine: LocalEngine, model: BaseModel) -> None:
    name = visit.scale.agreement_shape
    kl_by_depth(visit, name, engine, engine.adapter_sampler(), visit.scale.agreement_tokens, model)


def kl_by_depth(
    visit: Visit, name: str, engine: LocalEngine, sampler: SamplingClient, tokens: int, model: BaseModel
) -> None:
    """Sample, score the same tokens with the trainer, and summarise the differences by position in the completion.

    The estimate of KL(sampler || trainer) is the mean of exp(-d) - 1 + d with d = log q - log p (Schulman 2020, "k3"): unbiased
    and never negative.
    """
    vocabulary = min(model.vocab_size, 1500)
    prompts = [random_tokens(vocabulary, PROMPT_TOKENS, seed=i) for i in range(max(1, visit.scale.agreement_rows // 8))]
    params = tinker.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[], seed=1)
    futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
    sampled, sequences = [], []
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            sampled.append(np.array(sequence.logprobs, dtype=np.float64))
            sequences.append([*prompt, *sequence.tokens])
    forced = teacher_forced(engine.training, sequences)
    difference_RT = np.stack([q - p[PROMPT_TOKENS - 1 :] for q, p in zip(sampled, forced, strict=True)])
    add = visit.findings.table(
        f"Sampler against trainer, {name}, bfloat16, temperature 1: log q - log p by position in the completion",
        ["positions", "tokens", "KL (k3)", "RMS", "median |d|", "90 %", "99 %", "99.9 %", "largest"],
    )
    kls: list[float] = []
    borders = [0, *[depth for depth in visit.scale.depths if depth < tokens], tokens]
    for low, high in itertools.pairwise(borders):
        d = difference_RT[:, low:high].reshape(-1)
        kl = float(np.mean(np.exp(-d) - 1 + d))
        quantiles = [float(value) for value in np.quantile(np.abs(d), (0.5, 0.9, 0.99, 0.999, 1.0))]
        values = [kl, float(np.sqrt(np.mean(d**2))), *quantiles]
        add([f"{low} to {high - 1}", f"{d.size:,}", *[f"{value:.1e}" for value in values]])
        where = f"{name}, positions {low} to {high - 1}"
        visit.findings.check(f"KL of sampler and trainer, {where}", kl, AGREEMENT.bound)
        kls.append(kl)
    if name == visit.scale.agreement_shape:
        visit.findings.mark(AGREEMENT.key, float(np.max(kls)))  # NaN stays


@torch.inference_mode()
def rounding_alone(visit: Visit) -> None:
    """The effect of bfloat16 on this random model without this engine: the exact KL between passes of transformers."""
    module = random_module(shape_of(visit.scale.agreement_shape), visit.device, torch.bfloat16)
    rows = [random_tokens(min(module.config.vocab_size, 1500), ROUNDED_TOKENS, seed=i) for i in range(2)]
    tokens = torch.tensor(rows, device=visit.device)

    def logprobs() -> torch.Tensor:
        rows = [module(row[None], use_cache=False).logits[0].float().log_softmax(-1) for row in tokens]
        return torch.cat(rows)

    passes = {"sdpa, one sequence at a time": logprobs()}
    together = module(tokens, use_cache=False).logits.flatten(0, 1).float()
    passes["sdpa, both in one batch"] = together.log_softmax(-1)
    module.set_attn_implementation("eager")
    passes["eager attention"] = logprobs()
    exact = module.float()
    passes["float32"] = logprobs()
    del exact
    add = visit.findings.table(
        f"transformers alone, {visit.scale.agreement_shape}, bfloat16: KL of its passes, exact, mean of {tokens.numel()} tokens",
        ["pass", "against", "KL", "median |d| of the likeliest token"],
    )
    first, *others = passes
    for name, other in [(first, other) for other in others] + [("eager attention", "float32")]:
        p, q = passes[name], passes[other]
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        at = p.argmax(-1, keepdim=True)
        add([name, other, f"{kl:.1e}", f"{float((p - q).gather(1, at).abs().median()):.1e}"])


def grpo_step(visit: Visit, engine: LocalEngine, model: BaseModel) -> None:
    """Sample 8 x 8, train, take a new snapshot: the seconds of each part, in two steps."""
    workload = make_workload(model.vocab_size, visit.scale.grpo_tokens)
    sampler = engine.adapter_sampler()
    add = visit.findings.table(
        f"One GRPO step, {visit.scale.agreement_shape}, bfloat16: {workload.rows} samples of at most "
        f"{workload.max_new_tokens} tokens",
        ["step", "sampled tokens", "sampling", "training", "new snapshot", "all", "sampled tokens/s"],
    )
    for step in ("first", "second"):
        marks = [time.perf_counter()]
        sequences_P_G = sample_workload(sampler, workload, round_number=1)
        marks.append(time.perf_counter())
        data, tokens = policy_data(workload, sequences_P_G)
        engine.training.forward_backward(data, "importance_sampling")
        engine.training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
        visit.synchronize()
        marks.append(time.perf_counter())
        sampler = engine.adapter_sampler()
        marks.append(time.perf_counter())
        parts = np.diff(marks)
        seconds = [f"{value:.2f} s" for value in (*parts, parts.sum())]
        add([step, f"{tokens:,}", *seconds, number(tokens / float(parts[0]))])


def profile_decoding(visit: Visit, model: BaseModel) -> None:
    """Profile a few decode steps of the largest batch that fits next to the engine's cache."""
    batch, context = max(visit.scale.batches), visit.scale.contexts[0]
    adapters = frozen_adapters(model, visit.rank, 1)
    generator = None
    while generator is None:
        try:
            generator = started(visit, model, adapters, Cell(batch, context, 1), PROFILED_TURNS + 2)
        except MemoryError:
            if batch == 1:
                raise
            batch //= 2
    generator.step()

    def turns() -> None:
        for _ in range(PROFILED_TURNS):
            generator.step()

    tokens = PROFILED_TURNS * (BURST if is_captured(model) else 1)
    _kernel_table(visit, f"{tokens} decode steps, batch {batch}, context {context}, one adapter", turns)


def profile_training(visit: Visit, engine: LocalEngine, model: BaseModel) -> None:
    """Profile one forward and backward pass."""
    data = training_data(model.vocab_size, visit.scale.training_tokens[0], visit.scale.training_sequence, shared=False)

    state, worker = engine.training._run.state, engine.service._engine

    def call() -> None:
        finish(trainer.forward_backward(model, state, data, "cross_entropy", None, True))

    def on_worker() -> None:  # the profiler sees only the operators of its own thread
        call()
        _kernel_table(visit, f"forward and backward, {visit.scale.training_tokens[0]:,} tokens", call)

    worker.submit("profile", on_worker).result()


def _kernel_table(visit: Visit, what: str, action: Callable[[], object]) -> None:
    kind = "kernels" if visit.on_gpu else "operators (CPU)"
    add = visit.findings.table(
        f"Top {KERNELS} {kind}: {what}, {visit.scale.agreement_shape}, bfloat16", ["kernel", "calls", "ms", "share"]
    )
    for row in _rows(top_kernels(visit.device, action, KERNELS)):
        add(row)


def _rows(kernels: Sequence[tuple[str, int, float, float]]) -> list[list[str]]:
    return [[name[:120], str(calls), f"{ms:.2f}", f"{share:.1%}"] for name, calls, ms, share in kernels]
