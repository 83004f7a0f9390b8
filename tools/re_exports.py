"""Modules that only re-export names, for scripts of the ecosystem that import them from there: one table, and its modules.

    python -m tools.re_exports            write the modules
    python -m tools.re_exports --check    fail if a module differs from the table

A module of the table contains nothing else, and nothing in this project imports it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinker_cookbook.utils.files import write_text
from tinker_local_backend.command import check_command

ROOT = Path(__file__).resolve().parents[1]

TABLE: dict[str, dict[str, str]] = {
    "tinker_cookbook.checkpoint_utils": {
        "tinker_cookbook.models.renderer": "RENDERER_NAME_METADATA_KEY add_renderer_name_to_user_metadata "
        "check_renderer_name_for_checkpoint check_renderer_name_for_checkpoint_async get_renderer_name_from_checkpoint "
        "get_renderer_name_from_checkpoint_async resolve_renderer_name_from_checkpoint_or_default "
        "resolve_renderer_name_from_checkpoint_or_default_async",
        "tinker_cookbook.runs.checkpoints": "PendingCheckpoint append_checkpoint get_last_checkpoint load_checkpoints_file "
        "save_checkpoint save_checkpoint_async submit_checkpoint",
        "tinker_cookbook.runs.manager": "CheckpointManager",
        "tinker_cookbook.stores.checkpoint_record": "CheckpointRecord",
        "tinker_cookbook.stores.training_store": "CHECKPOINTS_BASE_NAME",
    },
    "tinker_cookbook.display": {
        "tinker_cookbook.renderers.datum_text": "colorize_example example_text to_ints",
        "tinker_cookbook.rl.trajectory_text": "format_trajectory",
    },
    "tinker_cookbook.environments": {
        "tinker_cookbook.env": "DatasetSettings Environment Rubric TurnResult get_env known_envs load multi_turn_env "
        "register_env single_turn_env tool_env unregister_env",
    },
    "tinker_cookbook.eval.evaluators": {
        "tinker_cookbook.runs.evaluation": "Evaluator EvaluatorBuilder SamplingClientEvaluator "
        "SamplingClientEvaluatorBuilder TrainingClientEvaluator",
    },
    "tinker_cookbook.hyperparam_utils": {
        "tinker_cookbook.models.hyperparameters": "get_lr get_hidden_size is_known known_lr warn_if_low "
        "get_lora_lr_over_full_finetune_lr "
        "get_full_finetune_lr_multiplier get_lora_lr_multiplier get_full_finetune_param_count "
        "get_lora_param_count model_config",
    },
    "tinker_cookbook.model_info": {
        "tinker_cookbook.models.info": "ModelAttributes get_llama_info get_qwen_info get_mistral_info "
        "get_gemma_info get_deepseek_info "
        "get_gpt_oss_info get_moonshot_info get_nvidia_info get_zai_info get_thinkingmachines_info "
        "get_model_attributes get_recommended_renderer_names get_recommended_renderer_name "
        "warn_if_renderer_not_recommended get_context_length",
    },
    "tinker_cookbook.renderers.base": {
        "tinker_cookbook.renderers.content": "PARSE_FAILURE_DETAIL_MAX_CHARS UNTERMINATED_TOOL_BLOCK_ERROR "
        "classify_parse_failure content_to_jsonable detect_unterminated_tool_block ensure_list ensure_text "
        "format_content_as_string "
        "get_text_content has_thinking message_to_jsonable parse_content_blocks parse_think_blocks "
        "remove_thinking",
        "tinker_cookbook.renderers.decoding": "Utf8TokenDecoder tokens_weights_from_strings_weights",
        "tinker_cookbook.renderers.images": "ImageProcessorProtocol image_to_chunk",
        "tinker_cookbook.renderers.renderer": "RenderContext RenderedMessage Renderer",
        "tinker_cookbook.renderers.replies": "parse_response_for_stop_token",
        "tinker_cookbook.renderers.streaming": "ReasoningStreamingParser StreamingParser",
        "tinker_cookbook.renderers.types": "AudioPart Content ContentPart ImagePart Message MessageDelta ParseFailureKind "
        "ParseTermination Role StreamingMessageHeader StreamingTextDelta StreamingThinkingDelta StrictBase TextPart ThinkingPart "
        "ToolCall ToolSpec TrainOnWhat UnparsedToolCall",
        "tinker_cookbook.tokenizer_utils": "Tokenizer",
    },
    "tinker_cookbook.rl.preference_envs": {
        "tinker_cookbook.preference.envs": "PairwisePreferenceDataset PairwisePreferenceGroupBuilder "
        "PairwisePreferenceRLDatasetBuilder PreferenceEnv Prompt TournamentPattern get_pairs get_pairs_chunked",
    },
    "tinker_cookbook.utils.file_utils": {"tinker_cookbook.utils.files": "read_jsonl"},
    "tinker_cookbook.utils.ml_log": {
        "tinker_cookbook.runs.loggers": "Logger dump_config",
        "tinker_cookbook.runs.ml_log": "JsonLogger MultiplexLogger PrettyPrintLogger log_metrics read_metrics setup_logging",
        "tinker_cookbook.runs.trackers": "NeptuneLogger TrackioLogger WandbLogger",
        "tinker_cookbook.utils.run_logs": "configure_logging_module",
    },
}
"""Module -> modules that define its names -> those names, separated by spaces."""


def source(homes: Mapping[str, str]) -> str:
    """The text of a module, formatted."""
    files = [home.replace("tinker_cookbook.", "").replace(".", "/") + ".py" for home in homes]
    origin = " and ".join(sorted(files, reverse=True)) if len(files) < 4 else "names of other modules"
    lines = [f'"""Re-exports {origin}, for scripts that import this path."""', ""]
    for home in sorted(homes):
        lines += _bracketed(f"from {home} import ", "()", sorted(homes[home].split(), key=_order))
    every = sorted((name for names in homes.values() for name in names.split()), key=_order)
    lines += ["", *_bracketed("__all__ = ", "[]", [f'"{name}"' for name in every])]
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, then functions, each in alphabetical order."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _bracketed(start: str, brackets: str, names: Sequence[str]) -> list[str]:
    line = start + ", ".join(names)
    if brackets == "[]":
        line = f"{start}[{', '.join(names)}]"
    if len(line) <= 120:
        return [line]
    return [start + brackets[0], *(f"    {name}," for name in names), brackets[1]]


def place(module: str) -> Path:
    """The file of a module."""
    return ROOT / (module.replace(".", "/") + ".py")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns 1 if a module is stale, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.re_exports")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a module differs from the table")
    check = parser.parse_args(argv).check
    stale = [name for name in TABLE if not place(name).exists() or place(name).read_text() != source(TABLE[name])]
    for name in stale:
        print(f"{'stale' if check else 'wrote'}: {name}")
        if not check:
            write_text(place(name), source(TABLE[name]))
    return int(check and bool(stale))


if __name__ == "__main__":
    check_command()
    sys.exit(main(sys.argv[1:]))
