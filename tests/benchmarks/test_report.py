"""Tables that say who did not run, files that are whole, and the README section made from them."""

import json
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.harness import Measurement, Repetition, absent
from benchmarks.report import Report, comparison_table, markdown, number
from benchmarks.tables import BEGIN, END, NO_RESULTS, Config, main, render, replace_section


def measured(name: str, seconds: float, tokens: int, is_ours: bool = False) -> Measurement:
    repetitions = [Repetition(i, seconds, tokens, 2.0, 0.0, disturbed=i == 1) for i in (1, 2, 3)]
    return Measurement(name, is_ours, repetitions=repetitions)


RESULTS = [measured("ours", 1.0, 4000, True), measured("peer", 2.0, 4000), absent("vllm", "not installed (pip ...)")]


def report() -> Report:
    result = Report("sampling", "tiny", "float32", "cpu", {"date": "today", "commit": "abc"}, [])
    result.add_comparison("Speed", RESULTS, per_token=True)
    return result


def test_a_row_per_contender_and_a_ratio_per_contender_of_ours() -> None:
    table = comparison_table("Speed", RESULTS, per_token=True)
    assert table.columns == ["contender", "tokens", "seconds", "tokens/s", "ours / it", "disturbed"]
    assert table.rows[0] == ["ours", "4,000", "1 (1 to 1)", "4,000 (4,000 to 4,000)", "", "1 of 3, 0 redone"]
    assert table.rows[1][4] == "2x (2 to 2)"
    assert table.rows[2][:2] == ["vllm", "not installed (pip ...)"]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_unequal_work_is_marked() -> None:
    table = comparison_table("Speed", [RESULTS[0], measured("peer", 1.0, 2000)], per_token=True)
    assert table.rows[1][1] == "2,000 (not the same work)"


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (99.94, "99.9"), (0.01234, "0.0123"), (0, "0"), (1.2e-5, "1.2e-05")]
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_files_hold_what_was_reported(tmp_path: Path) -> None:
    paths = report().write(str(tmp_path / "new"))
    assert sorted(path.name for path in paths) == ["sampling_tiny_float32_cpu.json", "sampling_tiny_float32_cpu.md"]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)  # no temporary file is left
    assert json.loads(paths[0].read_text())["measurements"]["Speed"][1]["repetitions"][2]["seconds"] == 2.0
    assert Report.read(paths[0]) == report()
    assert paths[1].read_text() == markdown(report())


def test_markdown_escapes_what_would_break_a_table() -> None:
    text = markdown(Report("b", "tiny", "float32", "cpu", {}, [comparison_table("T", [absent("a|b", "x\ny")], True)]))
    assert "| a\\|b | x y |" in text


def test_tables_fill_the_marked_section_of_the_readme(tmp_path: Path) -> None:
    report().write(str(tmp_path))
    (tmp_path / "records.json").write_text('{"megabytes": 24}')  # results of another form
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # again changes nothing
        main(Config(results=str(tmp_path), readme=str(readme)))
        assert readme.read_text() == f"before\n{BEGIN}\n\n{markdown(report(), '###')}\n{END}\nafter\n"


def test_no_results_and_no_markers(tmp_path: Path) -> None:
    assert render(tmp_path) == NO_RESULTS
    with pytest.raises(BenchmarkError, match="readme"):
        replace_section("no markers", "x")


def test_the_readme_has_the_markers() -> None:
    readme = Path(Config().readme).read_text()
    assert replace_section(readme, "x")


def on(day: int, peer_seconds: float) -> Report:
    results = [measured("ours", 1.0, 4000, True), measured("peer", peer_seconds, 4000), absent("vllm", "not installed")]
    value = Report("sampling", "tiny", "float32", "cpu", {"date": f"2026-11-{day} 10:00 UTC"}, [])
    value.add_comparison("Speed", results, per_token=True)
    value.measurements["config"] = {"groups": 8}
    return value


def test_earlier_results_stand_beside_those_of_today(tmp_path: Path) -> None:
    on(22, 2.0).write(str(tmp_path))
    assert "Beside" not in render(tmp_path)
    on(21, 4.0).write(str(tmp_path / "earlier" / "2026-11-21"))
    lines = render(tmp_path).splitlines()
    start = lines.index("| contender | tokens/s, 11-21 | tokens/s, 11-22 | ours / it, 11-21 | ours / it, 11-22 |")
    assert lines[start + 2 : start + 5] == ["| ours | 4,000 | 4,000 |  |  |", "| peer | 1,000 | 2,000 | 4x | 2x |", ""]
