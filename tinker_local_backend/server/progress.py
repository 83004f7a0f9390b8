"""What is new of a sample that is being drawn, from the engine's worker to whoever streams it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinker_local_backend.engine.sampling.sampler import SampledSequence
from tinker_local_backend.wire.frames import Frame


class Progress:
    """Tells each token of each sample once, also when the sample begins again and draws it a second time."""

    def __init__(self, tell: Callable[[Frame], None]):
        self._tell = tell
        self._told: dict[int, int] = {}

    def __call__(self, sequences: Sequence[SampledSequence]) -> None:
        news: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            told = self._told.get(index, 0)
            if len(sequence.tokens) > told:
                self._told[index] = len(sequence.tokens)
                news.append(
                    {
                        "index": index,
                        "tokens": sequence.tokens[told:],
                        "logprobs": sequence.logprobs[told:].tolist(),
                        "topk": [[ids.tolist(), logprobs.tolist()] for ids, logprobs in sequence.topk[told:]],
                    }
                )
        if news:
            self._tell(Frame({"progress": news}))
