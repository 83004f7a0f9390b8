"""Re-exports models/info.py, for scripts that import this path."""

from tinker_cookbook.models.info import (
    ModelAttributes,
    get_context_length,
    get_deepseek_info,
    get_gemma_info,
    get_gpt_oss_info,
    get_llama_info,
    get_mistral_info,
    get_model_attributes,
    get_moonshot_info,
    get_nvidia_info,
    get_qwen_info,
    get_recommended_renderer_name,
    get_recommended_renderer_names,
    get_thinkingmachines_info,
    get_zai_info,
    warn_if_renderer_not_recommended,
)

__all__ = [
    "ModelAttributes",
    "get_context_length",
    "get_deepseek_info",
    "get_gemma_info",
    "get_gpt_oss_info",
    "get_llama_info",
    "get_mistral_info",
    "get_model_attributes",
    "get_moonshot_info",
    "get_nvidia_info",
    "get_qwen_info",
    "get_recommended_renderer_name",
    "get_recommended_renderer_names",
    "get_thinkingmachines_info",
    "get_zai_info",
    "warn_if_renderer_not_recommended",
]
