"""How much a visit measures: real shapes on a GPU, tiny ones where the command itself is tried on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScaleName = Literal["full", "tiny"]


@dataclass(frozen=True)
class Scale:
    """Sizes of every section. Shapes are names in `benchmarks.models.SHAPES`."""

    name: ScaleName
    correctness_shape: str
    correctness_layers: int
    """layers of the random model whose losses a float64 model on the CPU computes again"""
    decoding_shapes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    adapters: tuple[int, ...]
    decode_steps: int
    training_shapes: tuple[str, ...]
    training_tokens: tuple[int, ...]
    training_sequence: int
    """tokens of one sequence; half of it is the prompt"""
    training_repetitions: int
    agreement_shape: str
    agreement_rows: int
    agreement_tokens: int
    depths: tuple[int, ...]
    """upper borders of the ranges of completion positions in which differences are summed up"""
    grpo_tokens: int
    peer_shape: str
    peer_tokens: int
    peer_repetitions: int


SCALES: dict[str, Scale] = {
    "full": Scale(
        name="full",
        correctness_shape="qwen3-0.6b",
        correctness_layers=4,
        decoding_shapes=("qwen3-4b", "qwen3-0.6b"),
        batches=(64, 1, 256, 8),
        contexts=(512, 2048),
        adapters=(1, 0, 8),
        decode_steps=12,
        training_shapes=("qwen3-4b", "qwen3-0.6b"),
        training_tokens=(4096, 8192, 16384),
        training_sequence=1024,
        training_repetitions=3,
        agreement_shape="qwen3-4b",
        agreement_rows=64,
        agreement_tokens=512,
        depths=(16, 64, 128, 256, 512),
        grpo_tokens=128,
        peer_shape="qwen3-0.6b",
        peer_tokens=128,
        peer_repetitions=2,
    ),
    "tiny": Scale(
        name="tiny",
        correctness_shape="tiny",
        correctness_layers=2,
        decoding_shapes=("tiny",),
        batches=(4, 1),
        contexts=(32, 64),
        adapters=(1, 0, 2),
        decode_steps=4,
        training_shapes=("tiny",),
        training_tokens=(256, 512),
        training_sequence=64,
        training_repetitions=2,
        agreement_shape="tiny",
        agreement_rows=8,
        agreement_tokens=48,
        depths=(16, 48),
        grpo_tokens=16,
        peer_shape="tiny",
        peer_tokens=16,
        peer_repetitions=1,
    ),
}
