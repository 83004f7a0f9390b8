"""Direct preference optimization from Python: pairs of replies in a file, a run, and its results.

In a notebook use `summary = await train_dpo.main_async(config)`. Run from the repository's root:

    python -m examples.dpo
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tinker_cookbook.backends import check_command
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL, RENDERER = "tiny_chat", "qwen3_instruct"
PAIRS = [
    {"prompt": f"Where are the {things}?", "chosen": f"The {things} are on the second floor.", "rejected": "No idea."}
    for things in ("maps", "atlases", "novels", "poems", "letters", "comics", "records", "puzzles")
]


def make_config(log_path: str) -> train_dpo.Config:
    file = Path(log_path) / "pairs.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    pairs = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(file), test_size=2),
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=512, batch_size=3
        ),
    )
    return train_dpo.Config(
        dataset_builder=pairs,
        model_name=MODEL,
        renderer_name=RENDERER,
        learning_rate=1e-3,
        num_epochs=4,
        dpo_beta=0.1,
        recipe_name="dpo_example",
        log_path=str(Path(log_path) / "run"),
    )


def main(log_path: str) -> RunSummary:
    return asyncio.run(train_dpo.main_async(make_config(log_path)))


if __name__ == "__main__":
    check_command()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    summary = main(folder)
    print(f"{summary.steps} steps, held-out accuracy {summary.metrics['test/accuracy']:.2f}: {summary.sampler_path}")
