"""Small configs of decoder-only architectures that transformers knows, each with what makes it different switched on.

Windows are shorter than the sequences that are compared, soft caps and scales are far from neutral, and heads are tied or not as
in the released models: whatever the engine left out would show.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from benchmarks.architecture_dense import DENSE
from benchmarks.architecture_experts import EXPERTS_AND_LATENT
from benchmarks.architecture_parts import IDS
from benchmarks.architecture_states import STATES

ARCHITECTURES: dict[str, dict[str, Any]] = {**DENSE, **EXPERTS_AND_LATENT, **STATES}
"""By transformers' model type."""


def make_config(model_type: str) -> PretrainedConfig:
    """The small config of an architecture."""
    fields = {key: value for key, value in ARCHITECTURES[model_type].items() if value is not None}
    if "text_config" in fields:
        return AutoConfig.for_model(model_type, text_config={**IDS, **fields["text_config"]})
    return AutoConfig.for_model(model_type, **{**IDS, **fields})
