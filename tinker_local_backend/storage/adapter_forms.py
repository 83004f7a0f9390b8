"""File layouts of an adapter on routed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, Tables, to_peft
from tinker_local_backend.engine.model.stacked_experts import one_by_one, to_stacked

PEFT_PREFIX = "base_model.model."

ExpertForm = Literal["peft", "stacked", "one_by_one"]
"""`peft`: A and B of all experts in one matrix each, as PEFT saves `target_parameters`. `stacked`: tensors with three
dimensions, as on the hosted service. `one_by_one`: separate matrices for each expert."""

_WRITERS: Mapping[ExpertForm, Callable[[Sequence[ExpertMatrix], Tables], dict[str, torch.Tensor]]] = {
    "peft": to_peft,
    "stacked": to_stacked,
    "one_by_one": one_by_one,
}


def in_form(form: ExpertForm, matrices: Sequence[ExpertMatrix], tables: Tables) -> dict[str, torch.Tensor]:
    """The tensors of routed experts in this form, by name without PEFT's prefix."""
    return _WRITERS[form](matrices, tables)


def plain_config(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """adapter_config.json for tensors of one rank that are named after their modules: no `target_parameters`, no patterns."""
    only_of_parameters = ("target_parameters", "rank_pattern", "alpha_pattern")
    leaves = sorted({name.split(".")[-3] for name in tensors})
    return {**{k: v for k, v in config.items() if k not in only_of_parameters}, "target_modules": leaves}
