"""The public recipes that run here, with the keys that make them small. Everything else is the recipe's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.ecosystem.data import rubric_lines
from tests.ecosystem.stubs import Files

LINES = ("Wo ist der Garten?", "Where is the garden?", "Der Garten ist gross.", "The garden is big.")


Keys = Mapping[str, object]


@dataclass(frozen=True)
class PublicRecipe:
    """One recipe.

    Attributes:
        module: below tinker_cookbook.recipes.
        keys: for the command line, besides the model and the folder of the run.
        model_key: of the model; None where the recipe names the model itself.
        log_paths: folders of its runs below the working folder; the first is given with `log_path_key`.
        log_path_key: None for a recipe that chooses the folders itself, below the folder of all runs.
        writes: a file that it makes instead of training.
        files: path in the working folder -> rows of a JSONL file or lines of a text that the recipe reads.
        stands_in: what could not be had and what stands in for it.
    """

    name: str
    module: str
    keys: Keys = field(default_factory=dict)
    model_key: str | None = "model_name"
    log_paths: tuple[str, ...] = ("run",)
    log_path_key: str | None = "log_path"
    writes: str | None = None
    files: Files = field(default_factory=dict)
    stands_in: str = "the dataset"


SMALL_RL: Keys = {"group_size": 4, "max_steps": 2, "eval_every": 0, "renderer_name": "qwen3_instruct"}

RECIPES = (
    PublicRecipe("sl_basic", "sl_basic", {"max_steps": 2}),
    PublicRecipe("sl_loop", "sl_loop", {"batch_size": 8, "max_length": 512, "save_every": 2, "max_steps": 3}),
    PublicRecipe(
        "rl_basic",
        "rl_basic",
        {"max_tokens": 12, "max_steps": 1},
    ),
    PublicRecipe("rl_loop", "rl_loop", {"batch_size": 8, "group_size": 16, "max_tokens": 12, "max_steps": 2}),
    PublicRecipe(
        "chat_sl",
        "chat_sl.train",
        {"batch_size": 8, "max_length": 512, "eval_every": 2, "save_every": 2, "max_steps": 3},
    ),
    PublicRecipe("math_rl", "math_rl.train", {"groups_per_batch": 8, "group_size": 4, "max_tokens": 8, "max_steps": 2}),
    PublicRecipe("preference.dpo", "preference.dpo.train", {"batch_size": 8, "max_length": 256, "max_steps": 3}),
    PublicRecipe("preference.shorter", "preference.shorter.train", {**SMALL_RL, "batch_size": 4, "max_tokens": 16}),
    PublicRecipe(
        "preference.rlhf_pipeline",
        "preference.rlhf.rlhf_pipeline",
        {
            "short_name": "tiny",
            "batch_size": 8,
            "max_length": 256,
            "lora_rank": 8,
            "rl_max_tokens": 12,
            "rl_group_size": 3,
            "eval_every": 0,
            "max_steps": 2,
        },
        model_key="base_model",
        log_paths=("runs/rlhf-tiny/sft", "runs/rlhf-tiny/rm", "runs/rlhf-tiny/rl"),
        log_path_key=None,
    ),
    PublicRecipe(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        {**SMALL_RL, "batch_size": 4, "max_tokens": 12},
        stands_in="nothing",
    ),
    PublicRecipe(
        "twenty_questions",
        "multiplayer_rl.twenty_questions.train",
        {**SMALL_RL, "batch_size": 8, "max_tokens": 12, "num_epochs": 1},
        stands_in="the model that answers",
    ),
    PublicRecipe(
        "on_policy_distillation",
        "distillation.on_policy_distillation",
        {
            "teacher_model": "{model}",
            "groups_per_batch": 4,
            "group_size": 2,
            "max_tokens": 16,
            "eval_every": 0,
            "lora_rank": 8,
            "max_steps": 2,
        },
    ),
    PublicRecipe(
        "off_policy_reasoning",
        "distillation.off_policy_reasoning",
        {
            "batch_size": 8,
            "max_prompts": 32,
            "buffer_size": 16,
            "renderer_name": "qwen3_instruct",
            "max_length": 256,
            "lora_rank": 8,
            "max_steps": 3,
        },
    ),
    PublicRecipe(
        "prompt_distillation.create_data",
        "prompt_distillation.create_data",
        {"output_file": "made/languages.jsonl"},
        model_key=None,
        log_path_key=None,
        log_paths=(),
        writes="made/languages.jsonl",
        files={"tinker_cookbook/example_data/multilingual.txt": LINES},
        stands_in="the model that labels, the sentences",
    ),
    PublicRecipe(
        "prompt_distillation.train",
        "prompt_distillation.train",
        {"file_path": "made/languages.jsonl", "batch_size": 4, "num_epochs": 3, "eval_every": 0, "max_length": 256},
        files={
            "made/languages.jsonl": [
                {"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": "de"}]}
                for line in LINES
            ]
        },
        stands_in="the sentences",
    ),
    PublicRecipe(
        "sdft",
        "sdft.train",
        {
            "groups_per_batch": 4,
            "max_tokens": 16,
            "topk": 8,
            "lora_rank": 8,
            "eval_every": 0,
            "save_every": 2,
            "max_context_length": 1024,
            "max_steps": 2,
        },
    ),
    PublicRecipe(
        "rubric",
        "rubric.train",
        {
            "groups_per_batch": 4,
            "train_group_size": 4,
            "grader_llm_name": "{model}",
            "max_tokens": 8,
            "max_steps": 2,
            "grader_renderer_name": "qwen3_instruct",
            "renderer_name": "qwen3_instruct",
            "eval_every": 0,
            "train_jsonl_path": "train.jsonl",
            "test_jsonl_path": "test.jsonl",
        },
        files={"train.jsonl": rubric_lines(16), "test.jsonl": rubric_lines(2)},
        stands_in="the dataset, the model that grades",
    ),
    PublicRecipe(
        "search_tool",
        "search_tool.train",
        {**SMALL_RL, "batch_size": 4, "max_tokens": 48, "max_turns": 3, "max_trajectory_tokens": 4096},
        stands_in="the dataset, the index (chromadb), the embedding service (google-genai)",
    ),
)
"""Those that the library promises to run."""
