"""Evaluators that a training loop runs on the way: of the training client, or of a snapshot that can be sampled from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from tinker_cookbook.clients import SamplingClient, TrainingClient


class TrainingClientEvaluator(ABC):
    """Measures something through forward passes of the training client."""

    @abstractmethod
    async def __call__(self, training_client: TrainingClient) -> dict[str, float]: ...


class SamplingClientEvaluator(ABC):
    """Measures something by sampling from a snapshot."""

    @abstractmethod
    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]: ...


Evaluator: TypeAlias = TrainingClientEvaluator | SamplingClientEvaluator
EvaluatorBuilder: TypeAlias = Callable[[], Evaluator]
SamplingClientEvaluatorBuilder: TypeAlias = Callable[[], SamplingClientEvaluator]
