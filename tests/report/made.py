"""Run folders made by hand, through the writers that a loop uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rl.handmade import trajectory, turn
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.rollout_files import StepRollouts, write_rollouts
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.runs.vocabulary import write_vocabulary
from tinker_cookbook.stores.training_store import METRICS_BASE_NAME, TrainingRunStore
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.files import append_jsonl
from tinker_cookbook.utils.lazy import torch

MODEL = "tiny_chat"


def said(text: str | Sequence[int]) -> TokensWithLogprobs:
    """A reply of this text, or of these ids."""
    ids = get_tokenizer(MODEL).encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)
    return TokensWithLogprobs(tokens=ids, maybe_logprobs=[-0.25 * (i + 1) for i in range(len(ids))], stop_reason="stop")


def write_run(folder: Path, config: dict[str, Any], rows: Sequence[dict[str, Any]], recipe: str = "rl_basic") -> Path:
    """A run with these metrics and no rollouts."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run_metadata.json").write_text(json.dumps({"recipe": recipe, "argv": ["x"], "versions": {}}))
    for row in rows:
        append_jsonl(folder / METRICS_BASE_NAME, row)
    return folder


def write_step(folder: Path, step: int, groups: Sequence[Sequence[tuple[str, str | Sequence[int], float]]]) -> None:
    """Rollouts of a step: of each group, members as (prompt, reply, reward), each trained on its reward less the mean."""
    made = [
        TrajectoryGroup(
            [trajectory(turn(said(prompt).tokens, said(reply))) for prompt, reply, _ in group],
            [reward for _, _, reward in group],
            [{"m": 1.0} for _ in group],
        )
        for group in groups
    ]
    advantages = [
        torch.tensor([reward - sum(r for _, _, r in group) / len(group) for _, _, reward in group]) for group in groups
    ]
    data_D, metadata_D = assemble_training_data(made, advantages)
    about = {"step": step, "model": MODEL}
    trainer = [datum.loss_fn_inputs["logprobs"].to_numpy() - 0.5 for datum in data_D]
    rollouts = StepRollouts(
        made, [step] * len(made), [values.tolist() for values in advantages], data_D, metadata_D, trainer, about
    )
    store = TrainingRunStore.in_folder(folder)
    write_vocabulary(store, get_tokenizer(MODEL))
    write_rollouts(store, step, rollouts)
