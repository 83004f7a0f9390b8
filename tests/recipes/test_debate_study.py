"""The comparison of protocols: its numbers come from what was measured, and its words from its numbers."""

from pathlib import Path

import pytest

from recipes.debate_study import (
    CLIConfig,
    Measured,
    Run,
    estimate,
    fill_page,
    gap,
    lead,
    markdown,
    sentence,
    table_rows,
)
from tinker_cookbook.exceptions import ConfigurationError


def measured(correct: float, accepted: float | None = None, items: int = 40) -> Measured:
    """`correct` of the items always right, the others never."""
    right = [float(i < correct * items) for i in range(items)]
    judged = right if accepted is None else [float(i < accepted * items) for i in range(items)]
    agree = [float(a == b) for a, b in zip(right, judged, strict=True)]
    return Measured(right, judged, agree, [0.75] * 5, 20.0)


def run(protocol: str, after: float, seed: int = 0, accepted: float | None = None) -> Run:
    return Run(protocol, seed, 10, 1000 + seed, 1.0, measured(0.25), measured(after, accepted))


RUNS = [run("debate", 0.9), run("direct", 0.5), run("self_consistency", 0.3, accepted=0.8), run("truth", 0.95)]


def test_each_protocol_has_a_row_with_what_it_came_to() -> None:
    before, *rows = table_rows(RUNS)
    assert before[0] == "before" and before[5].startswith("0.25")
    assert [row[0] for row in rows] == ["debate", "direct", "self_consistency", "truth"]
    assert rows[1][5].startswith("0.50") and rows[1][6].startswith("0.40")
    assert rows[0][6] == ""


def test_the_gap_is_what_the_judge_accepts_too_much() -> None:
    assert gap([RUNS[2]]).mean == pytest.approx(0.5)
    assert gap([RUNS[0]]).mean == 0


def test_a_lead_is_taken_seed_by_seed() -> None:
    own, others = [run("debate", 0.8, 0), run("debate", 0.6, 1)], [run("direct", 0.4, 1), run("direct", 0.7, 0)]
    assert lead(own, others).mean == pytest.approx(0.15)
    assert estimate(own, "correct_I").mean == pytest.approx(0.7)


@pytest.mark.parametrize(("debate", "words"), [(0.9, "beats"), (0.1, "loses to"), (0.5, "cannot be told apart from")])
def test_the_sentence_says_what_the_interval_says(debate: float, words: str) -> None:
    said = sentence([run("debate", debate), *RUNS[1:]])
    assert f"{words} the best other signal without the truth, direct" in said
    assert "0.5" in said


def test_without_a_rival_nothing_is_said() -> None:
    assert sentence([RUNS[0], RUNS[3]]).startswith("Nothing to compare")


def test_the_table_takes_its_place_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- study -->\nold\n<!-- end of study -->\nAfter.\n")
    filled = fill_page(str(page), markdown(RUNS))
    assert filled.startswith("Before.\n<!-- study -->\n\n| signal |") and filled.endswith(
        "<!-- end of study -->\nAfter.\n"
    )
    assert "old" not in filled
    page.write_text(filled)
    assert fill_page(str(page), markdown(RUNS)) == filled


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"protocols": ("debate", "oracle")}, "protocols=oracle"),
        ({"samples": 3}, "samples=3"),
        ({"seeds": ()}, "seeds"),
        ({"page": "nowhere.md"}, "page='nowhere.md'"),
    ],
)
def test_settings_that_make_no_study_are_refused(keys: dict, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        CLIConfig(**keys)
