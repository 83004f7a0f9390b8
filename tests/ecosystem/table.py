"""The public programs that run here, with the keys that make them small. Everything else is the program's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.ecosystem.data import forecast_lines, rubric_lines, sums
from tests.ecosystem.stubs import Files

LINES = ("Wo ist der Garten?", "Where is the garden?", "Der Garten ist gross.", "The garden is big.")


Keys = Mapping[str, object]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        path: a module below tinker_cookbook.recipes; of a tutorial its file.
        keys: for the command line, besides the model and the folder of the run. {model} and {checkpoint} stand for the model
            and for a checkpoint of it that can be sampled from.
        kind: a recipe trains and saves; a tutorial is a notebook, run from its first cell to its last; a script is another module
            that is a program.
        arguments: for the command line, before the keys.
        model_key: of the model; None where the program names the model itself.
        log_paths: folders of its runs below the working folder; the first is given with `log_path_key`.
        log_path_key: None for a program that chooses the folders itself, below the folder of all runs.
        writes: a file that it makes.
        says: a pattern of what it prints when it has got to its end.
        files: path in the working folder -> rows of a JSONL file or lines of a text that the program reads.
        typed: what it reads from its terminal.
        stands_in: what could not be had and what stands in for it.
        left: why it does not run here; such a program is not started.
        needs: packages that it alone imports, with what they need in turn.
    """

    name: str
    path: str
    keys: Keys = field(default_factory=dict)
    kind: Literal["recipe", "tutorial", "script"] = "recipe"
    arguments: tuple[str, ...] = ()
    model_key: str | None = "model_name"
    log_paths: tuple[str, ...] = ("run",)
    log_path_key: str | None = "log_path"
    writes: str | None = None
    says: str | None = None
    files: Files = field(default_factory=dict)
    typed: str = ""
    stands_in: str = "the dataset"
    left: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Programs of a release that are run together.

    Attributes:
        own_library: on tinker-cookbook's own library instead of this one; the engine is this project's in both.
    """

    name: str
    version: str
    programs: tuple[Program, ...]
    own_library: bool = False


def tutorial(
    name: str, says: str, stands_in: str = "the model", log_paths: tuple[str, ...] = (), left: str = ""
) -> Program:
    """A notebook, which takes no keys."""
    return Program(
        name, f"{name}.py", kind="tutorial", model_key=None, log_path_key=None, log_paths=log_paths, says=says,
        stands_in=stands_in, left=left,
    )  # fmt: skip


def script(
    name: str, path: str, keys: Keys | None = None, *, model: bool = True, trains: bool = False, says: str | None = None,
    arguments: tuple[str, ...] = (), writes: str | None = None, files: Files | None = None, typed: str = "",
    stands_in: str = "the dataset", left: str = "", needs: tuple[str, ...] = (),
) -> Program:  # fmt: skip
    """A module beyond the recipes. `model`: it takes `model_name`; `trains`: it takes `log_path`, and trains and saves there."""
    return Program(
        name, path, keys or {}, kind="script", model_key="model_name" if model else None, says=says, arguments=arguments,
        log_paths=("run",) if trains else (), log_path_key="log_path" if trains else None, writes=writes, files=files or {},
        typed=typed, stands_in=stands_in, left=left, needs=needs,
    )  # fmt: skip


SMALL_RL: Keys = {"group_size": 4, "max_steps": 2, "eval_every": 0, "renderer_name": "qwen3_instruct"}

RECIPES = (
    Program("sl_basic", "sl_basic", {"max_steps": 2}),
    Program("sl_loop", "sl_loop", {"batch_size": 8, "max_length": 512, "save_every": 2, "max_steps": 3}),
    Program(
        "rl_basic",
        "rl_basic",
        {"max_tokens": 12, "max_steps": 1},
    ),
    Program("rl_loop", "rl_loop", {"batch_size": 8, "group_size": 16, "max_tokens": 12, "max_steps": 2}),
    Program(
        "chat_sl",
        "chat_sl.train",
        {"batch_size": 8, "max_length": 512, "eval_every": 2, "save_every": 2, "max_steps": 3},
    ),
    Program("math_rl", "math_rl.train", {"groups_per_batch": 8, "group_size": 16, "max_tokens": 8, "max_steps": 2}),
    Program("preference.dpo", "preference.dpo.train", {"batch_size": 8, "max_length": 256, "max_steps": 3}),
    Program("preference.shorter", "preference.shorter.train", {**SMALL_RL, "batch_size": 4, "max_tokens": 16}),
    Program(
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
    Program(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        {**SMALL_RL, "batch_size": 4, "max_tokens": 12},
        stands_in="nothing",
    ),
    Program(
        "twenty_questions",
        "multiplayer_rl.twenty_questions.train",
        {**SMALL_RL, "batch_size": 8, "max_tokens": 12, "num_epochs": 1},
        stands_in="the model that answers",
    ),
    Program(
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
    Program(
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
    Program(
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
    Program(
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
    Program(
        "sdft",
        "sdft.train",
        {
            "groups_per_batch": 4,
            "max_tokens": 16,
            "topk": 8,
            "lora_rank": 8,
            "eval_every": 0,
            "save_every": 1,
            "max_context_length": 1024,
            "max_steps": 2,
        },
    ),
    Program(
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
    Program(
        "search_tool",
        "search_tool.train",
        {**SMALL_RL, "batch_size": 4, "max_tokens": 48, "max_turns": 3, "max_trajectory_tokens": 4096},
        stands_in="the dataset, the index (chromadb), the embedding service (google-genai)",
    ),
)

TUTORIALS = (
    tutorial("101_hello_tinker", "Sample 2:"),
    tutorial("102_first_sft", r"(?s)Model: moonshotai.*Step +9: loss.*\nA: "),
    tutorial("103_async_patterns", "Throughput:"),
    tutorial("104_first_rl", r"(?s)Step +9\b", "the model, the dataset"),
    tutorial("201_rendering", "", left="loads the image processor of a model of the hub, which is not at hand"),
    tutorial("202_loss_functions", "Custom loss metrics:"),
    tutorial("203_completers", "Parsed score:"),
    tutorial("204_evaluations", ""),
    tutorial("301_cookbook_abstractions", r"Step \d+: mean_reward="),
    tutorial("302_custom_environment", "Response:"),
    tutorial("303_sft_with_config", "checkpoints.jsonl", log_paths=("runs/tutorials/sft-config",)),
    tutorial("304_rl_with_config", "checkpoints.jsonl", log_paths=("runs/tutorials/rl-config",)),
    tutorial("401_sl_hyperparams", r"Params \(M\)"),
    tutorial("402_rl_hyperparams", "Kept rewards:"),
    tutorial("403_dpo_preferences", ""),
    tutorial("404_sequence_extension", "Datum 1:"),
    tutorial("405_multi_agent", "zero-sum"),
    tutorial("406_prompt_distillation", "Student accuracy"),
    tutorial(
        "407_rlhf_pipeline",
        "=== RLHF Model ===",
        "the model, the datasets",
        tuple(f"runs/tutorials/rlhf/{stage}" for stage in ("sft", "rm", "rl")),
    ),
    tutorial("501_export_hf", "Vocab size:"),
    tutorial("502_lora_adapter", "adapter_config.json:"),
    tutorial("503_publish_hub", ""),
)

FORECASTS: Files = {"forecasts.csv": forecast_lines()}
SMALL_GAMES: Keys = {"renderer_name": "qwen3_instruct"}
SWEPT = [{"step": step, "test/nll": 3.0 / (step + 1), "train_mean_nll": 2.0, "time/step": 1.0} for step in range(3)]
INKLING = "imports Inkling's renderer, which is another package; the local engine does not run its models"
VERIFIERS = (
    "cffi", "cryptography", "griffelib", "jiter", "mcp", "mcp-types", "openai", "openai-agents", "python-multipart",
    "sse-starlette", "verifiers==0.1.9.post3",
)  # fmt: skip
PRINTS_NO_ERRORS = (
    "ends in an IndexError of its own: it gives verifiers 0.1.9 no errors to print beside several rewards"
)
PEARS: Files = {
    "pears.py": (
        "import verifiers as vf",
        "from datasets import Dataset",
        f"SUMS = {sums(32)!r}",
        "def right(completion, answer, **_):",
        "    return float(answer in str(completion[-1]['content']))",
        "def load_environment():",
        "    rows = [{'question': q + ' Write your answer in \\\\boxed{} format.', 'answer': str(a)} for q, a in SUMS]",
        "    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))",
    )
}

SCRIPTS = (
    script("multi_teacher", "distillation.on_policy_multi_teacher",
        {
            "deepmath_teacher_model": "{model}", "tulu3_teacher_model": "{model}", "deepmath_groups_per_batch": 4,
            "tulu3_groups_per_batch": 4, "group_size": 2, "max_tokens": 16, "eval_every": 0, "lora_rank": 8, "max_steps": 2,
        },
        trains=True, stands_in="the datasets",
    ),
    script("rl_numerics_check", "rl_numerics_check.train",
        {
            "renderer_name": "qwen3_instruct", "groups_per_batch": 2, "group_size": 4, "max_tokens": 48, "max_steps": 2,
            "task.num_pages_min": 2, "task.num_pages_max": 3, "task.page_chars": 300, "max_trajectory_tokens": 6000,
        },
        trains=True,
    ),
    script("forecasting.data", "forecasting.data", arguments=("--data-path", "forecasts.csv"), model=False,
        says="validation: 12 examples", files=FORECASTS),
    script("forecasting.train", "forecasting.train",
        {
            "data_path": "forecasts.csv", "renderer_name": "qwen3_instruct", "max_steps": 1, "eval_every": 0,
            "groups_per_batch": 4, "group_size": 4, "validation_group_size": 2, "max_tokens": 24,
        },
        trains=True, files=FORECASTS,
    ),
    script("decisions.forecasting", "decisions.forecasting", left=INKLING),
    script("decisions.demo", "decisions.demo", left=INKLING),
    script("true_thinking_score.analyze", "true_thinking_score.analyze",
        {"n_problems": 2, "max_tokens": 48, "log_path": "scores", "renderer_name": "qwen3_instruct"}, says="Summary: "),
    script("true_thinking_score.small", "true_thinking_score.run_small_experiment", model=False, says="Results saved to",
        stands_in="the model"),
    script("sweep.cli", "chat_sl.sweep.cli",
        {
            "recipe": "sft", "learning_rates": "[1e-4]", "lora_ranks": "[8]", "training_budget_examples": 16,
            "sweep_dir": "sweep", "base.batch_size": 8, "base.max_length": 256, "base.model_name": "{model}",
            "base.dataset": "no_robots",
        },
        model=False, says="(?i)best",
    ),
    script("sweep.launch_all", "chat_sl.sweep.launch_all", arguments=("--dry-run",), model=False, says="learning_rates",
        stands_in="nothing"),
    script("rubric.generate_data", "rubric.generate_data", model=False, says="Generated test dataset",
        writes="tinker_cookbook/example_data/example_rubric_test.jsonl",
        files={"tinker_cookbook/example_data/note.txt": ("",)}, stands_in="nothing"),
    script("rubric.debug_env", "rubric.debug_env", model=False, stands_in="the models"),
    script("rubric.prometheus", "rubric.prometheus_experimental",
        {
            "groups_per_batch": 4, "train_group_size": 4, "grader_llm_name": "{model}", "max_tokens": 8, "max_steps": 1,
            "grader_renderer_name": "qwen3_instruct", "renderer_name": "qwen3_instruct", "eval_every": 0,
        },
        trains=True, stands_in="the dataset, the model that grades",
    ),
    script("text_arena.train", "multiplayer_rl.text_arena.train",
        {
            **SMALL_GAMES, "batch_size": 8, "num_train_datapoints": 32, "num_test_datapoints": 4, "max_tokens": 8,
            "test_opponent": "random", "eval_every": 0, "max_steps": 2,
        },
        trains=True, stands_in="nothing",
    ),
    script("text_arena.play", "multiplayer_rl.text_arena.play",
        {**SMALL_GAMES, "checkpoint_path": "{checkpoint}", "mode": "eval", "opponent": "optimal", "num_games": 2},
        says=r"Wins: \d/2, Draws: \d/2, Losses: \d/2", stands_in="the checkpoint",
    ),
    script("sdft.benchmark", "sdft.benchmark",
        {
            "renderer_name": "qwen3_instruct", "data_dir": "papers", "log_root": "runs", "lora_rank": 8, "groups_per_batch": 4,
            "max_tokens": 8, "max_steps": 1, "eval_every": 0, "save_every": 0, "sft_batch_size": 4, "sft_max_steps": 2,
        },
        writes="runs/benchmark_summary_science.json", says="BENCHMARK SUMMARY",
    ),
    script("sdft.run_continual_learning", "sdft.run_continual_learning",
        {
            "data_dir": "papers", "log_root": "runs", "lora_rank": 8, "batch_size": 4, "max_tokens": 256, "topk": 4,
            "methods": "sft,sdft_is,sdft_topk", "learning_rates": "1e-4",
        },
        says="EXPERIMENT COMPLETE", writes="runs/stage1_checkpoints.json",
    ),
    script("search_tool.offline_eval", "search_tool.offline_eval",
        {
            "base_model": "{model}", "renderer_name": "qwen3_instruct", "tinker_checkpoint_url": "{checkpoint}",
            "max_eval_samples": 4, "max_tokens": 48, "max_trajectory_tokens": 4096,
        },
        model=False, says=r"(?m)^OVERALL", stands_in="the dataset, the index (chromadb), the embedding service (google-genai)",
    ),
    script("sweep.analyze", "chat_sl.sweep.analyze", arguments=("--local-dir", "sweeps", "--output-dir", "found"), model=False,
        files={f"sweeps/Qwen-Qwen3-8B/learning_rate={rate}_lora_rank=8/metrics.jsonl": SWEPT for rate in ("0.0001", "0.001")},
        writes="found/sft_sweep.md", says="Plot saved", stands_in="the runs",
    ),
    script("verifiers_rl.train", "verifiers_rl.train",
        {
            "renderer_name": "qwen3_instruct", "vf_env_id": "pears", "group_size": 4, "groups_per_batch": 4, "max_tokens": 24,
            "lora_rank": 8, "learning_rate": 1e-3, "max_steps": 2, "save_every": 0,
        },
        trains=True, files=PEARS, needs=VERIFIERS, stands_in="the environment",
    ),
    script("verifiers_rl.evaluate", "verifiers_rl.evaluate", left=PRINTS_NO_ERRORS),
)  # fmt: skip

SUITES = (
    Suite("recipes of tinker-cookbook 0.5.8", "0.5.8", RECIPES),
    Suite("recipes of tinker-cookbook 0.6.1", "0.6.1", RECIPES),
    Suite(
        "recipes of tinker-cookbook 0.6.1, with its own library on the local engine", "0.6.1", RECIPES, own_library=True
    ),
    Suite("tutorials of tinker-cookbook 0.6.1", "0.6.1", TUTORIALS),
    Suite("further scripts of tinker-cookbook 0.5.8", "0.5.8", SCRIPTS),
)
