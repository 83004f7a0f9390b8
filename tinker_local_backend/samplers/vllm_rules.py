"""Probe which logprobs a vLLM reports, and refuse requests for which they differ from the engine's.

The engine's are those of softmax(logits / temperature) before top-k, top-p and min-p. vLLM's modes either ignore the temperature
(raw_logprobs, its default) or renormalise after truncation (processed_logprobs). Our worker samples with the engine's code
and does neither.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace

import torch

from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.errors import ModelLoadError
from tinker_local_backend.samplers.adapters import AdapterFiles
from tinker_local_backend.samplers.transport import Died, Event, Failed, Ready, Request, Transport

MIN_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures, except 0, to this."""

TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.5}
"""Bound on |difference of a logprob| in the check that vLLM serves the engine's model. Other weights exceed it by far."""

_TEMPERATURE = 0.5
_SIGNIFICANT = 1e-3


@dataclass(frozen=True)
class Rules:
    """How a vLLM's logprobs differ from the engine's."""

    ignores_temperature: bool = False
    renormalises: bool = False

    def refusal(self, request: SamplingRequest) -> str | None:
        """Why a request is refused, with the fix; None if it is not."""
        if 0 < request.temperature < MIN_TEMPERATURE:
            return (
                f"temperature {request.temperature} is raised to {MIN_TEMPERATURE} by vLLM; use 0 (greedy) or at least "
                f"{MIN_TEMPERATURE}"
            )
        fix = "or unset TINKER_LOCAL_VLLM_URL, so that a local vLLM process samples"
        if self.ignores_temperature and request.temperature not in (0, 1):
            return (
                f"temperature {request.temperature}: this vLLM reports logprobs of temperature 1 (raw_logprobs); use "
                f"temperature 1 or 0, start the server with --logprobs-mode processed_logprobs, {fix}"
            )
        limited = request.top_k > 0 or request.top_p < 1 or request.min_p > 0
        if self.renormalises and limited and request.temperature > 0:
            return (
                f"top_k {request.top_k}, top_p {request.top_p:g}, min_p {request.min_p:g}: this vLLM reports logprobs that are "
                f"renormalised after them (processed_logprobs); use top_k=-1, top_p=1 and min_p=0, {fix}"
            )
        return None


def start_and_probe(
    transport: Transport, events: queue.SimpleQueue[Event], model: BaseModel, blank: AdapterFiles | None, where: str
) -> tuple[Ready, Rules]:
    """Wait until vLLM is ready, check that it serves the model, and probe its rules.

    Args:
        blank: a zero adapter, through which the base model is sampled.

    Raises ModelLoadError.
    """
    plain = Request(-1, probe_prompt(model), 1, 1, blank, topk=1)
    tempered = replace(plain, number=-2, temperature=_TEMPERATURE)
    probes = [plain, tempered, replace(tempered, number=-3, top_k=1)]
    transport.start(probes)
    ready: Ready | None = None
    answers: dict[int, tuple[int, float]] = {}
    while ready is None or len(answers) < len(probes):
        event = events.get()
        if isinstance(event, Failed | Died):
            raise ModelLoadError(f"model {model.name!r} cannot be sampled with vLLM: {event.error}")
        if isinstance(event, Ready):
            ready = event
            continue
        for delta in event:
            if delta.tokens:
                assert delta.topk is not None
                answers[delta.number] = delta.topk[0][0]
    (token, at_one), (_, at_half), (_, limited) = (answers[probe.number] for probe in probes)
    check_same_model(model, plain.prompt, token, at_one, where)
    return ready, Rules(
        ignores_temperature=abs(at_half - at_one) < _SIGNIFICANT,
        renormalises=abs(limited - at_half) > _SIGNIFICANT,
    )


def probe_prompt(model: BaseModel) -> tuple[int, ...]:
    """A few tokens spread over the vocabulary, so that the next token is uncertain."""
    return tuple(model.vocab_size * share // 23 for share in (3, 7, 2, 11, 5))


@torch.inference_mode()
def check_same_model(model: BaseModel, prompt: tuple[int, ...], token: int, logprob: float, where: str) -> None:
    """Raise ModelLoadError unless the engine's logprob of `token` after the prompt is about the same."""
    tokens = torch.tensor(prompt, device=model.device)
    positions = torch.arange(len(prompt), device=model.device)
    hidden_TH = model.hidden_states(tokens, positions, PackedPlan.whole([len(prompt)]), None)
    ours_V = torch.log_softmax(model.logits(hidden_TH[-1:], None)[0], dim=-1)
    ours = float(ours_V[token]) if token < len(ours_V) else float("-inf")
    if not abs(ours - logprob) <= TOLERANCE[model.dtype]:
        raise ModelLoadError(
            f"{where} gives token {token} after {list(prompt)} the logprob {logprob:.4f}, model {model.name!r} gives it "
            f"{ours:.4f}: it serves other weights or another dtype; serve {model.name!r} in "
            f"{str(model.dtype).removeprefix('torch.')} (TINKER_LOCAL_DTYPE)"
        )
