"""Saved debates: records of a run, or a file of labelled debates. Enough to judge them again or to train a judge."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.data.rows import Row, read_file
from tinker_cookbook.data.shipped import shipped_path
from tinker_cookbook.debate.records import read_view, view_record
from tinker_cookbook.debate.views import DebateView, Seat, Winner
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.utils.fields import FieldGroup

EXPECTED = '{"instance_id": "...", "view": {...}, "verdict": "A"}'


@dataclass(frozen=True)
class SavedDebate:
    """A debate as the judge saw it."""

    instance_id: str
    """of the question; several debates may share it"""
    view: DebateView
    verdict: Winner
    """the judge's verdict; INVALID if no judge was asked"""

    @property
    def label(self) -> Winner | None:
        """The only right option; None if correctness is unknown, or the number of right options is not 1."""
        right = [i for i, seat in enumerate(self.view.both()) if seat.correct]
        known = all(seat.correct is not None for seat in self.view.both())
        return Winner(Seat(right[0]).name) if known and len(right) == 1 else None

    def row(self) -> dict[str, Any]:
        """A line of a file for `load_debates`."""
        return {"instance_id": self.instance_id, "view": view_record(self.view), "verdict": self.verdict.value}


@chz.chz(typecheck=True)
class SavedDebates(FieldGroup):
    """Where to read saved debates."""

    debates: str = chz.field(doc="folder of a run with debates, or a .jsonl file of debates")


def load_debates(path: str | Path) -> list[SavedDebate]:
    """Load the debates of a run's folder (debate_*.json, sorted by name), or of a .jsonl file of `SavedDebate.row`.

    Raises:
        ConfigurationError: there is no such file, or no debate in the folder.
        DataFormatError: a record without a valid view of a debate; the message names its location.
    """
    place = Path(shipped_path(path)).expanduser()
    if place.is_file():
        return read_file(place, _of_row, EXPECTED, "debates")
    files = sorted(place.rglob("debate_*.json"), key=lambda file: (file.name, file))
    if not files:
        raise ConfigurationError(
            f"debates={str(path)!r}: neither a .jsonl file nor a folder with debate_*.json; give the folder of a run of "
            "debate_rs_grpo (num_groups_to_log says how many groups of a step are written)"
        )
    return [_of_file(file) for file in files]


def labelled(debates: Sequence[SavedDebate]) -> list[SavedDebate]:
    """The debates with exactly one right option. Raises ConfigurationError when there is none."""
    labelled_debates = [debate for debate in debates if debate.label is not None]
    if not labelled_debates:
        raise ConfigurationError(
            f"none of the {len(debates)} debates has exactly one right side, by which a judge could be trained or measured"
        )
    return labelled_debates


def _of_row(row: Row) -> SavedDebate:
    return _read(row.content)


def _of_file(file: Path) -> SavedDebate:
    try:
        return _read(json.loads(file.read_text()))
    except ValueError as error:
        raise DataFormatError(f"{file}: {error}; expected {EXPECTED}") from error


def _read(record: Mapping[str, Any]) -> SavedDebate:
    try:
        return SavedDebate(str(record["instance_id"]), read_view(record["view"]), Winner(record["verdict"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataFormatError(f"holds no view of a debate ({type(error).__name__}: {error})") from error
