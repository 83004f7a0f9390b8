"""Independent reference for the engine: transformers' model in float64, with merged weights and autograd."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tinker_local_backend import TrainingClient


def expert_tensor(experts: Any, leaf: str) -> str:
    """Name of the tensor of a routed experts module with the outputs of a matrix: gate and up may be fused in one tensor."""
    return leaf if hasattr(experts, leaf) else "gate_up_proj"


def experts_with(experts: Any, leaf: str, weights: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A tensor of routed experts plus the delta (experts or 1, out, in) of a matrix, added to all of it or to gate or up only."""
    by_output = weights.transpose(1, 2) if experts.is_transposed else weights
    outputs = torch.arange(by_output.shape[1])
    if expert_tensor(experts, leaf) != leaf:
        halves = outputs.chunk(2) if experts.is_concatenated else (outputs[::2], outputs[1::2])
        outputs = halves[leaf == "up_proj"]
    added = by_output.index_add(1, outputs, delta.expand(len(by_output), -1, -1))
    return added.transpose(1, 2) if experts.is_transposed else added


class Reference:
    """A model in double precision, always on the CPU. LoRA is merged into the weights as W + scale * B @ A."""

    def __init__(self, model_path: str):
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)

    def adapter_of(self, client: TrainingClient) -> dict[str, torch.Tensor]:
        """Double precision copies of a client's A and B matrices, as autograd leaves, in the engine's order."""
        named = client._run.state.adapter.named_parameters()
        return {name: matrix.detach().cpu().double().clone().requires_grad_() for name, matrix in named}

    def logits(self, tokens: Sequence[int], adapter: Mapping[str, torch.Tensor] | None = None, scale: float = 1.0):
        """Logits (N, vocabulary) in float64 of one sequence."""
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        merged = {}
        for name, a in (adapter or {}).items():
            module, _, which = name.rpartition(".lora_")
            if which == "A.weight":
                b = (adapter or {})[f"{module}.lora_B.weight"]
                if f"{module}.weight" in weights:
                    merged[f"{module}.weight"] = weights[f"{module}.weight"] + scale * b @ a
                else:
                    self._merge_experts(merged, weights, module, scale * b @ a)
        output = functional_call(
            self.model, merged, (), {"input_ids": torch.tensor([list(tokens)])}, tie_weights=False, strict=False
        )
        return output.logits[0]

    def _merge_experts(
        self, merged: dict[str, torch.Tensor], weights: Mapping[str, torch.Tensor], name: str, delta: torch.Tensor
    ) -> None:
        parent, _, leaf = name.rpartition(".")
        experts = self.model.get_submodule(parent)
        tensor = f"{parent}.{expert_tensor(experts, leaf)}"
        merged[tensor] = experts_with(experts, leaf, merged.get(tensor, weights[tensor]), delta)

    def logprobs(
        self,
        tokens: Sequence[int],
        adapter: Mapping[str, torch.Tensor] | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """(N, vocabulary): log of softmax(logits / temperature)."""
        return torch.log_softmax(self.logits(tokens, adapter, scale) / temperature, dim=-1)

    def completion_logprobs(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        adapter: Mapping[str, torch.Tensor] | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
    ) -> np.ndarray:
        """Logprob of each completion token given everything before it."""
        with torch.no_grad():
            scores = self.logprobs([*prompt, *completion][:-1], adapter, scale, temperature)[len(prompt) - 1 :]
        return scores.gather(1, torch.tensor(list(completion))[:, None])[:, 0].numpy()


DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
    "stable_reinforce": {
        "weight_cap": 2.0,
        "token_ratio_low": 0.5,
        "token_ratio_high": 5.0,
        "sequence_log_ratio_bound": 1.0,
        "verify_provenance": 0.0,
    },
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
}


def datum_loss(
    loss_fn: str, lp: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]
) -> torch.Tensor:
    """The sum over one datum, by the formula; `inputs` has the datum's inputs in float64."""
    lp = lp.double()  # some models return logits in float32, whatever dtype they compute in
    if loss_fn == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    kept = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    q, advantages = inputs["logprobs"][kept], inputs["advantages"][kept]
    log_ratio_of_all = lp - inputs["logprobs"]
    lp = lp[kept]
    ratio = torch.where(advantages != 0, lp - q, 0.0).exp()  # elsewhere it may overflow, and is multiplied by 0
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "dro":
        return -(lp * advantages - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    if loss_fn == "sapo":
        signs = (advantages > 0).double()
        t = signs * config["temperature_positive"] + (1 - signs) * config["temperature_negative"]
        return -(4 / t / (1 + (t * (1 - ratio)).exp()) * advantages).sum()
    if loss_fn == "stable_reinforce":
        log_ratio = (lp - q).detach()
        if not kept.any() or abs(log_ratio.mean()) > config["sequence_log_ratio_bound"]:
            return torch.zeros((), dtype=torch.float64)
        weights = [
            min(w, config["weight_cap"]) if config["token_ratio_low"] <= w <= config["token_ratio_high"] else 0.0
            for w in log_ratio.exp().tolist()
        ]
        return -(lp.new_tensor(weights) * (lp - lp.detach() + 1) * advantages).sum()
    bounds = config["clip_low_threshold"], config["clip_high_threshold"]
    if loss_fn == "cispo":
        return -(ratio.clamp(*bounds).detach() * lp * advantages).sum()
    if loss_fn == "gspo":
        if not kept.any():
            return torch.zeros((), dtype=torch.float64)
        mean = log_ratio_of_all[inputs["sequence_ratio_mask"] == 1].mean()
        ratio = mean.exp().detach() * (lp - lp.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages).sum()


def loss_and_gradients(
    reference: Reference,
    client: TrainingClient,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    temperature: float = 1.0,
    config: Mapping[str, float] | None = None,
    at: Sequence[np.ndarray] | None = None,
) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
    """(loss sum, logprobs per datum, gradient per adapter matrix) of any built-in loss.

    at: logprobs per datum at which the loss and its slopes are taken, instead of the model's own. With those of an engine
        that rounds more, each ratio is the engine's, on the same side of a clip; the slopes then go through this model.
    """
    adapter = reference.adapter_of(client)
    scale = 32 / client._run.state.adapter.spec.rank
    total = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for i, datum in enumerate(data):
        inputs = {key: torch.from_numpy(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
        targets = inputs.pop("target_tokens")
        scores = reference.logprobs(datum.model_input.to_ints(), adapter, scale, temperature)
        lp = scores.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        inputs = {key: value.double() for key, value in inputs.items()}
        logprobs.append(lp.detach().numpy())
        if at is not None:
            lp = lp + (torch.from_numpy(at[i]).double() - lp).detach()
        total = total + datum_loss(loss_fn, lp, inputs, {**DEFAULTS[loss_fn], **(config or {})})
    if not total.requires_grad:
        return float(total), logprobs, {name: np.zeros(tuple(matrix.shape)) for name, matrix in adapter.items()}
    gradients = torch.autograd.grad(total, list(adapter.values()), allow_unused=True)
    named = {
        name: np.zeros(tuple(matrix.shape)) if gradient is None else gradient.numpy()
        for (name, matrix), gradient in zip(adapter.items(), gradients, strict=True)
    }
    return float(total.detach()), logprobs, named
