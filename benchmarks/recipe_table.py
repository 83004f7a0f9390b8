"""Arguments and expected changes of each recipe, for `benchmarks.recipe_runs` and the smoke test."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinker_cookbook.runs.outcome import before_and_after, first_and_last
from tinker_cookbook.utils.files import read_jsonl


@dataclass(frozen=True)
class Measure:
    """A number that a recipe improves, by its documentation."""

    key: str
    better: Literal["up", "down"]
    at: Literal["evaluations", "steps"] = "evaluations"
    """compare the first and the last evaluation, or means over the first and the last five steps"""
    folder: str = ""
    """folder of the metrics.jsonl, below the run's folder"""

    def read(self, log_path: Path) -> tuple[float, float] | None:
        rows = read_jsonl(log_path / self.folder / "metrics.jsonl", tolerate_torn_tail=True)
        return (before_and_after if self.at == "evaluations" else first_and_last)(rows, self.key)

    def moved_right(self, before: float, after: float) -> bool:
        return after > before if self.better == "up" else after < before


@dataclass(frozen=True)
class RecipeRun:
    """How a recipe is run. `{folder}` is a fresh folder, `{sl_basic}` the folder of a finished sl_basic run."""

    module: str
    folder_key: str | None = "log_path"
    """the key for the folder; None for a recipe without one"""
    arguments: tuple[str, ...] = ()
    """required arguments"""
    small: tuple[str, ...] = ()
    """arguments that reduce it to seconds, for the smoke test"""
    measures: tuple[Measure, ...] = ()
    files: tuple[str, ...] = ()
    """files that it must write to the folder"""
    stdin: str = ""
    trainings: int = 1
    """number of consecutive trainings, each of which may take the time limit"""
    needs: tuple[str, ...] = field(default=())
    """required packages of an extra"""

    def command(self, folder: Path, sl_basic: Path, small: bool) -> list[str]:
        keys = [f"{self.folder_key}={{folder}}"] if self.folder_key else []
        keys += [*self.arguments, *(self.small if small else ())]
        filled = [key.format(folder=folder, sl_basic=sl_basic) for key in keys]
        return [sys.executable, "-m", self.module, *filled]


_RL = ("max_steps=2", "eval_every=2", "lora_rank=4", "on_zero_advantages=skip")
_CORRECT = Measure("env/all/correct", "up", "steps")
_FEW_ROLLOUTS = ("num_rollouts=16", "num_groups=2", "num_test=4")

RECIPES: tuple[RecipeRun, ...] = (
    RecipeRun(
        "recipes.sl_basic",
        small=("max_steps=3", "eval_every=3", "lora_rank=4"),
        measures=(Measure("test/nll", "down"),),
    ),
    RecipeRun(
        "recipes.sl_loop", small=("num_epochs=1", "lora_rank=4"), measures=(Measure("train_mean_nll", "down", "steps"),)
    ),
    RecipeRun(
        "recipes.anchors",
        small=(*_RL, "warm_up_steps=2", "groups_per_batch=2", "group_size=4", "num_test=4"),
        measures=(Measure("test/env/all/reward/total", "up"),),
        trainings=2,
    ),
    RecipeRun("recipes.full_fine_tuning", small=("max_steps=2",), measures=(Measure("test/nll", "down"),)),
    RecipeRun(
        "recipes.chat_sl",
        small=("max_steps=3", "eval_every=3", "lora_rank=4"),
        measures=(Measure("test/nll", "down"),),
    ),
    RecipeRun(
        "recipes.rl_basic",
        small=(*_RL, "groups_per_batch=4", "num_test=4"),
        measures=(Measure("env/all/reward/total", "up", "steps"), Measure("test/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.vlm_classifier.train",
        small=("max_steps=3", "eval_every=3", "lora_rank=4", "drawn_size=96", "test_size=8"),
        measures=(Measure("test/accuracy", "up"),),
    ),
    RecipeRun(
        "recipes.shapes_rl",
        small=(*_RL, "groups_per_batch=4", "num_test=4"),
        measures=(Measure("env/all/correct", "up", "steps"), Measure("test/env/all/correct", "up")),
        files=("images",),
    ),
    RecipeRun(
        "recipes.rl_loop",
        small=("max_steps=2", "groups_per_batch=4", "lora_rank=4"),
        measures=(Measure("reward", "up", "steps"),),
    ),
    RecipeRun(
        "recipes.single_turn",
        small=(*_RL, *_FEW_ROLLOUTS),
        measures=(Measure("env/all/task_reward", "up", "steps"), Measure("test/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.math_rl",
        small=(*_RL, "groups_per_batch=2", "group_size=4"),
        measures=(_CORRECT, Measure("test/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.guess_number",
        small=(*_RL, "groups_per_batch=2", "group_size=4", "warm_up_steps=2"),
        measures=(
            Measure("env/all/reward/total", "up", "steps"),
            Measure("test/env/all/reward/total", "up"),
            Measure("test/env/all/correct", "up"),
        ),
    ),
    RecipeRun(
        "recipes.twenty_questions",
        small=(*_RL, "groups_per_batch=2", "group_size=4", "warm_up_steps=2"),
        measures=(
            Measure("env/all/reward/total", "up", "steps"),
            Measure("test/env/all/reward/total", "up"),
            Measure("test/env/all/won", "up"),
        ),
    ),
    RecipeRun(
        "recipes.tool_use",
        small=(*_RL, "groups_per_batch=2", "group_size=4", "warm_up_steps=2"),
        measures=(_CORRECT, Measure("test/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.rl",
        small=(*_RL, "groups_per_batch=2", "group_size=4", "num_test=4", "env_args.highest=5"),
        measures=(Measure("env/all/reward/total", "up", "steps"), Measure("test/env/all/reward/total", "up")),
    ),
    RecipeRun(
        "recipes.run_experiment",
        arguments=("experiment=configs/mixture.toml",),
        small=(*_RL, "num_rollouts=16", "num_test=4"),
        measures=(Measure("env/all/reward/total", "up", "steps"),),
    ),
    RecipeRun(
        "recipes.multi_agent",
        small=(*_RL, "game=shared_sum", "num_test=4", "max_tokens=16"),
        measures=(Measure("test/env/all/reward/total", "up"),),
    ),
    RecipeRun(
        "recipes.debate_rs_grpo",
        small=(*_RL, *_FEW_ROLLOUTS),
        measures=(Measure("test/env/all/correct", "up"),),
    ),
    RecipeRun(
        "recipes.debate_tournament",
        folder_key="save_dir",
        small=("items=2", "players=honest,liar,verbose"),
        files=("tournament.json", "tournament.md"),
    ),
    RecipeRun(
        "recipes.compare",
        folder_key="save_dir",
        small=(
            "recipes.few=recipes.single_turn max_steps=1 eval_every=1 num_test=2 num_rollouts=16 num_groups=2",
            "recipes.debate=recipes.debate_rs_grpo max_steps=1 eval_every=1 num_test=2 num_rollouts=16 num_groups=2",
        ),
        files=("compare.json", "compare.md", "compare.svg"),
    ),
    RecipeRun(
        "recipes.debate_judge.create_data",
        folder_key=None,
        arguments=("output_path={folder}/debates.jsonl",),
        small=("max_items=24", "max_tokens=32"),
        files=("debates.jsonl",),
    ),
    RecipeRun(
        "recipes.debate_judge.sl",
        small=("max_steps=3", "eval_every=3", "lora_rank=4"),
        measures=(Measure("test/nll", "down"),),
    ),
    RecipeRun(
        "recipes.debate_judge.rl",
        small=(*_RL, "groups_per_batch=8", "group_size=8"),
        measures=(Measure("env/all/correct", "up", "steps"),),
    ),
    RecipeRun(
        "recipes.debate_judge.decisions",
        small=("max_steps=2", "eval_every=2", "lora_rank=4"),
        measures=(Measure("test/cross_entropy", "down"),),
    ),
    RecipeRun(
        "recipes.decisions",
        small=("max_steps=2", "eval_every=2", "lora_rank=4"),
        measures=(Measure("test/distance", "down"), Measure("test/cross_entropy", "down")),
    ),
    RecipeRun(
        "recipes.forecasting",
        small=("max_steps=2", "eval_every=2", "lora_rank=4"),
        measures=(Measure("test/brier", "down"),),
        files=("forecasts.jsonl", "verification.json"),
    ),
    RecipeRun(
        "recipes.demo",
        folder_key=None,
        arguments=("log_path={folder}",),
        small=("tokens=500", "protocols=direct,debate"),
        files=("study.json", "study.md", "debate_seed0/metrics.jsonl"),
        trainings=5,
    ),
    RecipeRun(
        "recipes.debate_study",
        small=(
            "tokens=500",
            "protocols=truth,self_consistency,consultancy",
            "seeds=1",
            "samples=2",
            "num_test=4",
        ),
        files=("study.json", "study.md", "truth_seed1/metrics.jsonl"),
        trainings=15,
    ),
    RecipeRun(
        "recipes.shorter",
        small=(*_RL, "groups_per_batch=2", "group_size=4"),
        measures=(Measure("env/all/ac_tokens_per_turn", "down", "steps"),),
    ),
    RecipeRun(
        "recipes.preference.train",
        small=("max_steps=2", "eval_every=2", "lora_rank=4"),
        measures=(Measure("test/accuracy", "up"), Measure("test/margin", "up")),
    ),
    RecipeRun(
        "recipes.preference.rlhf_pipeline",
        trainings=3,
        small=(
            "sft.num_epochs=1",
            "preference.num_epochs=1",
            "rl_steps=1",
            "groups_per_batch=2",
            "group_size=4",
            "lora_rank=4",
        ),
        measures=(
            Measure("test/nll", "down", folder="sft"),
            Measure("test/accuracy", "up", folder="preference_model"),
            Measure("test/win_rate", "up", folder="rl"),
        ),
    ),
    RecipeRun(
        "recipes.distillation.on_policy",
        small=("max_steps=2", "teacher_epochs=1", "eval_every=2", "groups_per_batch=4", "lora_rank=4"),
        measures=(Measure("teacher_kl", "down", "steps"), Measure("held_out/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.distillation.off_policy",
        small=("max_steps=2", "teacher_epochs=1", "eval_every=2", "lora_rank=4"),
        measures=(Measure("test/kl", "down"),),
    ),
    RecipeRun(
        "recipes.distillation.sdft",
        small=("max_steps=2", "warm_up_steps=2", "eval_every=2", "groups_per_batch=4", "lora_rank=4"),
        measures=(Measure("sdft/kl", "down", "steps"), Measure("test/env/all/correct", "up")),
    ),
    RecipeRun(
        "recipes.prompt_distillation.create_data",
        folder_key="output_path",
        small=("max_lines=20", "test_size=5"),
        files=("train.jsonl", "test.jsonl"),
    ),
    RecipeRun(
        "recipes.prompt_distillation.train",
        small=("max_steps=2", "eval_every=2", "lora_rank=4", "max_lines=40", "test_size=10", "batch_size=8"),
        measures=(Measure("test/agreement", "up"),),
    ),
    RecipeRun(
        "recipes.sweep",
        folder_key="sweep_dir",
        small=("recipe=recipes.rl_basic", "grid.learning_rate=1e-4", "set.max_steps=1", "set.num_test=4"),
        files=("sweep.csv", "sweep.parquet", "summary.json", "summary.md"),
    ),
    RecipeRun("recipes.eval_benchmarks", folder_key="save_dir", small=("max_items=4",), files=("summary.json",)),
    RecipeRun("recipes.eval_inspect", folder_key="log_dir", small=("limit=4",), needs=("inspect_ai",)),
    RecipeRun(
        "recipes.export",
        folder_key="output",
        arguments=("log_path={sl_basic}",),
        files=("adapter_config.json", "adapter_model.safetensors", "README.md"),
    ),
    RecipeRun(
        "recipes.validate_gpu",
        folder_key="output",
        small=("max_steps=1", "num_rollouts=16", "max_tokens=32"),
        files=("report.json", "report.md"),
    ),
    RecipeRun("recipes.models", folder_key=None, small=("like=gpt-oss",)),
    RecipeRun("recipes.chat", folder_key=None, arguments=("seed=0",), stdin="What is 2 + 3?\n/quit\n"),
)

NOT_SMOKED = {
    "recipes.code_rl": "needs a model that writes code; tests/recipes/test_code_rl.py runs it with scripted grades",
    "recipes.rubric": "needs a model that grades; tests/env/test_lm_rubric.py runs it with a scripted one",
    "recipes.verifiers_rl": "needs the package verifiers; `make test-verifiers` runs it",
    "recipes.anchor_study": "makes a dozen runs; tests/recipes/test_studies.py makes one",
    "recipes.staleness_study": "makes dozens of runs; tests/recipes/test_studies.py makes two",
    "recipes.rank_study": "makes dozens of runs; tests/recipes/test_studies.py makes a few",
    "recipes.debate_figures": "makes up to a hundred runs; tests/recipes/test_debate_figures.py makes the small parts",
    "recipes.replay": "takes the folder of a run; tests/recipes/test_debate_tools.py runs it",
    "recipes.debate_rejudge": "takes the folder of a run; tests/recipes/test_debate_tools.py runs it",
    "recipes.debate_pairs": "takes the folder of a run; tests/recipes/test_debate_tools.py runs it",
    "recipes.report": "takes the folder of a run; tests/report and tests/browser make its pages",
    "recipes.plot": "takes the folder of a run, and matplotlib; tests/report/test_figures.py draws",
    "recipes.check_artifacts": "takes the folder of a run; tests/recipes/test_check_artifacts.py runs it",
}
"""Command -> why it is not in the table."""
