"""Check that training learns: a random model is fine-tuned on a fixed text, and its loss curve is compared with TRL's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tinker

from benchmarks.gpu.findings import describe
from benchmarks.gpu.models import random_model, random_module, shape_of
from benchmarks.gpu.visit import Visit
from benchmarks.models import Shape, word_tokenizer
from benchmarks.ours import LEARNING_RATE, LocalEngine, completion_datum
from benchmarks.peers.registry import not_installed
from benchmarks.peers.trl_learning import losses_of_trl
from benchmarks.workload import TrainingSequence, random_tokens

RATE = 10 * LEARNING_RATE
"""Learning rate of LoRA on a text that repeats at every step."""

LEARNT = 0.9
"""Bound on last loss / first loss; 1 if steps do nothing."""

APART = 0.03
"""Bound on the difference of two trainers' losses at a step, as a share of the first loss: their initial adapters differ. With
half or twice the rate the difference exceeds 0.1 where the curve is steep."""

ROWS = 8
"""rows of the table, spread over the steps"""


def run(visit: Visit) -> None:
    """Record the engine's curve and, if it is installed, TRL's, and compare them."""
    scale, findings = visit.scale, visit.findings
    sequences = text(shape_of(scale.learning_shape), *scale.learning_text)
    curves = {"this engine": own_losses(visit, sequences)}
    why = not_installed("trl")
    if why is None:
        try:
            shape = shape_of(scale.learning_shape)
            module = random_module(shape, visit.device, visit.dtype)
            tokenizer = word_tokenizer(shape.vocab)
            curves["TRL"] = losses_of_trl(module, tokenizer, visit.rank, RATE, scale.learning_steps, sequences)
        except Exception as error:
            why = describe(error)
    findings.data["losses"] = curves
    add = findings.table(
        f"Loss on a fixed text of {len(sequences)} sequences, {scale.learning_shape}, {visit.dtype_name}, LoRA rank "
        f"{visit.rank}: nats per token{'' if why is None else f'; TRL: {why}'}",
        ["step", *curves],
    )
    steps = range(scale.learning_steps)
    for step in sorted({*steps[:: max(1, len(steps) // ROWS)], steps[-1]}):
        add([str(step + 1), *(f"{losses[step]:.3f}" for losses in curves.values())])
    judge(visit, curves)


def judge(visit: Visit, curves: Mapping[str, Sequence[float]]) -> None:
    """Check that every curve falls, and that the engine's is close to TRL's."""
    for name, losses in curves.items():
        visit.findings.check(f"learning, {name}: last loss as a share of the first", losses[-1] / losses[0], LEARNT)
    if "TRL" in curves:
        both = zip(*curves.values(), strict=True)
        apart = max(abs(ours - theirs) for ours, theirs in both) / curves["TRL"][0]
        visit.findings.check("learning: largest difference from TRL's loss, as a share of the first", apart, APART)


def text(shape: Shape, count: int, tokens: int) -> list[TrainingSequence]:
    """The same random words in every run; the loss is on all but the first."""
    return [TrainingSequence(random_tokens(shape.vocab, tokens, seed=7000 + i), prompt_length=1) for i in range(count)]


def own_losses(visit: Visit, sequences: Sequence[TrainingSequence]) -> list[float]:
    """Mean loss of each step in nats per token, before its update."""
    model = random_model(visit.scale.learning_shape, visit.device, visit.dtype)
    data = [completion_datum(sequence) for sequence in sequences]
    tokens = sum(len(sequence.completion) for sequence in sequences)
    losses = []
    with LocalEngine.of(model, visit.rank) as engine:
        for _ in range(visit.scale.learning_steps):
            # The losses are sums, and TRL's are means: Adam takes the same step for both, except for its epsilon.
            output = engine.training.forward_backward(data, "cross_entropy").result()
            engine.training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
            losses.append(output.metrics["loss:sum"] / tokens)
    del model, engine
    visit.free()
    return losses
