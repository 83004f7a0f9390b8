"""Transcripts of groups for people: what the policy was shown, what it said, and what that was worth.

One page per step and per evaluation, in the step's folder: `iteration_000003/train.html`, `iteration_000003/eval_test.html`,
each with the same as JSON beside it. Token ids are decoded here to be read, and for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.rl.rollout_logging import RolloutSummaryExportConfig
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.secrets import redactor

_Position: TypeAlias = "int | tinker.ModelInputChunk"
"""A token id, or a whole image or other media."""


@dataclass(frozen=True)
class ShownGroup:
    """A group with what its page says of it besides its rollouts."""

    group: TrajectoryGroup | FailedGroup
    advantages_G: Sequence[float] | Sequence[Sequence[float]] | None = None
    """before a share of a batch's tokens or a penalty changes them; None: it was not sampled for training"""
    sampling_client_step: int | None = None
    """optimizer updates (batches) that its policy had seen"""


@dataclass(frozen=True)
class _Evaluations:
    folder: Path
    step: int | None
    label: str | None

    def name(self, evaluator: str) -> str:
        return f"eval_{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.label or evaluator)}"


_evaluations: ContextVar[_Evaluations | None] = ContextVar("evaluations", default=None)


@contextmanager
def write_evaluations(folder: Path | None, step: int | None = None, label: str | None = None) -> Iterator[None]:
    """Let evaluators in the body write to a folder: transcripts, and with a step summaries that name it.

    Args:
        folder: None: they write nothing.
        label: names the files; None: each evaluator's own name does.
    """
    token = _evaluations.set(None if folder is None else _Evaluations(folder, step, label))
    try:
        yield
    finally:
        _evaluations.reset(token)


def eval_page(name: str) -> Path | None:
    """The page of an evaluation of this name; None where none is to be written."""
    found = _evaluations.get()
    return None if found is None else found.folder / f"{found.name(name)}.html"


def eval_summaries(name: str) -> tuple[Path, RolloutSummaryExportConfig] | None:
    """The folder for the summaries of an evaluation of this name, and what they say of it; None where none are to be written."""
    if (found := _evaluations.get()) is None or found.step is None:
        return None
    base_name = found.name(name)
    split = f"eval/{base_name.removeprefix('eval_')}"
    return found.folder, RolloutSummaryExportConfig(split, found.step, base_name, found.step)


def write_page(path: Path, title: str, groups: Sequence[ShownGroup], tokenizer: Tokenizer) -> None:
    """Write a page of groups, and its JSON."""
    page = logtree.Node("section", title)
    for index, shown in enumerate(groups):
        tags = f" [{', '.join(shown.group.tags)}]" if shown.group.tags else ""
        version = shown.sampling_client_step
        weights = f", sampled after {version} updates" if version is not None else ""
        _add_group(page.section(f"Group {index}{tags}{weights}"), shown, tokenizer)
    logtree.write_trace(page, path)


def rollout_rows(groups: Sequence[ShownGroup], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A row per member of the groups that came through, for the tables of trackers: what it was asked and what it said, turn
    after turn, and what became of it; of a debate also the seat, the verdict and the judge's words."""
    rows: list[dict[str, Any]] = []
    for index, shown in enumerate(groups):
        if isinstance(shown.group, FailedGroup):
            continue
        for i, trajectory in enumerate(shown.group.trajectories_G):
            info = shown.group.member_info_G[i] if shown.group.member_info_G else {}
            member = _member(shown.group, i, shown.advantages_G)
            said, before = "", list[_Position]()
            for turn, transition in enumerate(trajectory.transitions):
                added, _ = _delta(before, transition.ob)
                if turn > 0:
                    said += _decode(added, tokenizer)
                said += decode_tokens(tokenizer, transition.ac.tokens)
                before = [*_positions(transition.ob), *transition.ac.tokens]
            first = trajectory.transitions[0].ob if trajectory.transitions else trajectory.final_ob
            rows.append(
                {
                    "group": index,
                    **member,
                    "prompt": _decode(_positions(first), tokenizer),
                    "said": said,
                    "seat": info.get("agent"),
                    "verdict": info.get("verdict"),
                    "judge": info.get("judge"),
                }
            )
    return redactor()(rows)  # they leave this machine


def _add_group(section: logtree.Node, shown: ShownGroup, tokenizer: Tokenizer) -> None:
    group = shown.group
    errors = group.errors if isinstance(group, FailedGroup) else group.rollout_errors
    if errors:
        rows = [{"error": error.error_type, "message": error.error_message} for error in errors]
        section.table(rows, "given up" if isinstance(group, FailedGroup) else "failed attempts")
    if isinstance(group, FailedGroup):
        return
    members = [_member(group, i, shown.advantages_G) for i in range(len(group.trajectories_G))]
    section.table(members, "members")
    for i, (member, trajectory) in enumerate(zip(members, group.trajectories_G, strict=True)):
        told = [f"{key} {_told(member[key])}" for key in ("reward", "advantage") if key in member]
        folded = section.details(", ".join([f"Member {i}: {trajectory.stop_reason}", *told]))
        _add_trajectory(folded, trajectory, tokenizer)
        if about := {**group.metrics_G[i], **(group.member_info_G[i] if group.member_info_G else {})}:
            folded.table(about, "member")
    if group.notes:
        section.details("Notes on the group").children += group.notes


def _told(value: float | Sequence[float]) -> str:
    """A number, or one for each turn."""
    return ", ".join(f"{v:.6g}" for v in value) if isinstance(value, Sequence) else f"{value:.6g}"


def _member(
    group: TrajectoryGroup, i: int, advantages_G: Sequence[float] | Sequence[Sequence[float]] | None
) -> dict[str, Any]:
    trajectory = group.trajectories_G[i]
    row: dict[str, Any] = {
        "member": i,
        "reward": group.get_total_rewards()[i],
        "final reward": group.final_rewards_G[i],
    }
    if advantages_G is not None:
        row |= {"advantage": advantages_G[i], "selected": group.is_trained()[i]}
    return row | {
        "turns": len(trajectory.transitions),
        "sampled tokens": trajectory.num_action_tokens,
        "stop reason": trajectory.stop_reason,
    }


def _add_trajectory(section: logtree.Node, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    before: list[_Position] = []
    for turn, transition in enumerate(trajectory.transitions):
        shown, delta = _delta(before, transition.ob)
        label = "prompt" if turn == 0 else "observation" if delta else "prompt, which does not extend the turn before"
        section.text(_decode(shown, tokenizer), f"{label} ({transition.ob.length} tokens in all)")
        action = transition.ac
        section.text(
            decode_tokens(tokenizer, action.tokens), f"reply ({len(action.tokens)} tokens, {action.stop_reason})"
        )
        section.table({"reward": transition.reward, **transition.metrics, **transition.logs}, f"turn {turn}")
        section.children += transition.notes
        before = [*_positions(transition.ob), *action.tokens]
    shown, delta = _delta(before, trajectory.final_ob)
    if delta and shown:
        section.text(_decode(shown, tokenizer), "observation after the last turn")


def _delta(before: list[_Position], observation: tinker.ModelInput) -> tuple[list[_Position], bool]:
    """What an observation adds to the positions before it, and True; all of it, and False, where it does not extend them."""
    now = _positions(observation)
    extends = now[: len(before)] == before
    return (now[len(before) :] if extends else now), extends


def _positions(observation: tinker.ModelInput) -> list[_Position]:
    positions: list[_Position] = []
    for chunk in observation.chunks:
        positions += chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [chunk]
    return positions


def _decode(positions: Sequence[_Position], tokenizer: Tokenizer) -> str:
    """The text with its special tokens; media as their kind and length."""
    parts: list[str] = []
    for is_text, run in groupby(positions, key=lambda position: isinstance(position, int)):
        if is_text:
            parts.append(decode_tokens(tokenizer, [position for position in run if isinstance(position, int)]))
        else:
            parts += [f"[{type(chunk).__name__}: {chunk.length} tokens]" for chunk in run if not isinstance(chunk, int)]
    return "".join(parts)
