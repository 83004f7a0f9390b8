"""Small configs of transformers' decoder-only architectures, each with its distinctive features enabled.

Windows are shorter than the compared sequences, soft caps and scales are far from neutral, and heads are tied or not as in the
released models, so that a feature that the engine left out would show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from benchmarks.architecture_dense import DENSE
from benchmarks.architecture_experts import EXPERTS_AND_LATENT
from benchmarks.architecture_parts import IDS
from benchmarks.architecture_states import STATES

ARCHITECTURES: dict[str, dict[str, Any]] = {**DENSE, **EXPERTS_AND_LATENT, **STATES}
"""By transformers' model type."""

_ENCODER = "an encoder"
_ENCODER_DECODER = "an encoder-decoder"
_DRAFT = "drafts tokens from the keys of another model"
_IMAGES = "describes images"
_SOUND = "writes or reads sound"
NOT_LISTED = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"), _ENCODER),
    **dict.fromkeys(("xlm-roberta-xl", "xmod"), _ENCODER),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"), _ENCODER_DECODER),
    **dict.fromkeys(("mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"), _ENCODER_DECODER),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
    **dict.fromkeys(("emu3", "git", "mllama"), _IMAGES),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _SOUND),
    "dots3_note": "its text is dots3_note_text",
    "fuyu": "its text is persimmon",
    "gemma3": "its text is gemma3_text",
    "gemma3n": "its text is gemma3n_text",
    "gemma4": "its text is gemma4_text",
    "gemma4_unified": "its text is gemma4_unified_text",
    "got_ocr2": "its text is qwen2",
    "gpt-sw3": "is gpt2",
    "llama4": "its text is llama4_text",
    "moss_transcribe_diarize": "its text is qwen3",
    "qwen3_5": "its text is qwen3_5_text",
    "qwen3_5_moe": "its text is qwen3_5_moe_text",
    "qwen4_exp": "its text is qwen4_exp_text",
}
"""Model type of transformers' causal language models -> why it is not in the table."""


def unlisted() -> set[str]:
    """Model types of transformers' causal language models that are neither in the table nor in NOT_LISTED."""
    return {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING} - ARCHITECTURES.keys() - NOT_LISTED.keys()


def make_config(model_type: str) -> PretrainedConfig:
    """The small config of an architecture; a model that also takes images has its text config in `text_config`."""
    fields = _without_none(ARCHITECTURES[model_type])
    if "text_config" in fields:
        return AutoConfig.for_model(
            model_type, **{**fields, "text_config": {**IDS, **_without_none(fields["text_config"])}}
        )
    return AutoConfig.for_model(model_type, **{**IDS, **fields})


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
