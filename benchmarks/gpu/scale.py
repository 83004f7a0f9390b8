"""Sizes of a visit's measurements: real shapes on a GPU, tiny ones to try the command on a CPU."""

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
    """layers of the random model whose losses a float64 model on the CPU recomputes"""
    decoding_shapes: tuple[str, ...]
    """the first one is measured in all cells, the others in those of the marks"""
    mark_batches: tuple[int, ...]
    """in the order of marks.DECODE_MARKS, with the first context and the most adapters"""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    adapters: tuple[int, ...]
    bursts: int
    """measured bursts of a cell"""
    long_contexts: tuple[tuple[int, int], ...]
    """(batch, context) of the first shape, with the most adapters"""
    prompts: tuple[tuple[int, int, int], ...]
    """(number of prompts, tokens, cached tokens) of the section `prefill`; the first ones are short"""
    training_shapes: tuple[str, ...]
    """the first one with all numbers of tokens, the others with the largest"""
    training_tokens: tuple[int, ...]
    training_long: tuple[tuple[str, int], ...]
    """(shape, tokens) of single long sequences"""
    training_sequence: int
    """tokens of one sequence; half of it is the prompt"""
    training_repetitions: int
    agreement_shape: str
    agreement_rows: int
    agreement_tokens: int
    depths: tuple[int, ...]
    """upper bounds of the ranges of completion positions for which differences are summarised"""
    turns: tuple[int, int, int, int]
    """(turns, tokens of an observation, sampled tokens, conversations) of the section `turns`"""
    turn_borders: tuple[int, ...]
    """turns after which its table has a row"""
    grpo_tokens: int
    learning_shape: str
    learning_steps: int
    learning_text: tuple[int, int]
    """sequences, and tokens of each"""
    peer_shape: str
    peer_tokens: int
    peer_repetitions: int
    vllm_shapes: tuple[str, ...]
    """shapes for the comparison with vLLM, if it is installed"""


SCALES: dict[str, Scale] = {
    "full": Scale(
        name="full",
        correctness_shape="qwen3-0.6b",
        correctness_layers=4,
        decoding_shapes=("qwen3-4b", "qwen3-8b", "qwen3-0.6b"),
        mark_batches=(64, 256),
        batches=(64, 256, 1, 8),
        contexts=(1024, 512, 2048),
        adapters=(8, 0, 1),
        bursts=4,
        long_contexts=((16, 8192), (4, 32000)),
        prompts=((16, 1024, 0), (1, 16000, 0), (64, 2048, 1792), (4, 16000, 15744)),
        training_shapes=("qwen3-4b", "qwen3-8b", "qwen3-0.6b"),
        training_tokens=(16384, 8192, 4096),
        training_long=(("qwen3-4b", 16384), ("qwen3-0.6b", 16384), ("qwen3-4b", 65536), ("qwen3-4b", 32000)),
        training_sequence=1024,
        training_repetitions=3,
        agreement_shape="qwen3-4b",
        agreement_rows=64,
        agreement_tokens=512,
        depths=(16, 64, 128, 256, 512),
        turns=(30, 1936, 64, 1),
        turn_borders=(1, 5, 10, 20, 30),
        grpo_tokens=128,
        learning_shape="qwen3-0.6b",
        learning_steps=40,
        learning_text=(16, 512),
        peer_shape="qwen3-0.6b",
        peer_tokens=128,
        peer_repetitions=2,
        vllm_shapes=("qwen3-4b", "qwen3-8b"),
    ),
    "tiny": Scale(
        name="tiny",
        correctness_shape="tiny",
        correctness_layers=2,
        decoding_shapes=("tiny",),
        mark_batches=(4, 8),
        batches=(4, 8, 1),
        contexts=(64, 32),
        adapters=(2, 0, 1),
        bursts=1,
        long_contexts=((2, 128),),
        prompts=((2, 40, 0), (2, 60, 48)),
        training_shapes=("tiny",),
        training_tokens=(512, 256),
        training_long=(("tiny", 128),),
        training_sequence=64,
        training_repetitions=2,
        agreement_shape="tiny",
        agreement_rows=8,
        agreement_tokens=48,
        depths=(16, 48),
        turns=(3, 12, 8, 2),
        turn_borders=(1, 3),
        grpo_tokens=16,
        learning_shape="tiny",
        learning_steps=12,
        learning_text=(4, 32),
        peer_shape="tiny",
        peer_tokens=16,
        peer_repetitions=1,
        vllm_shapes=("tiny",),
    ),
}
