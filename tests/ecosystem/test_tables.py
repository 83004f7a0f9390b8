"""The tables of docs/ecosystem.md: what they say of a suite, and that a new one takes the place of its own alone."""

from tests.ecosystem.__main__ import MARK, PAGE, table, with_table
from tests.ecosystem.running import Outcome
from tests.ecosystem.table import SUITES, Program, Suite

FIRST, SECOND = (
    Suite(suite.name, suite.version, (Program("a", "a.train"), Program("b", "b"), Program("c", "c", left="no images")))
    for suite in SUITES[:2]
)
GOOD, BAD = Outcome("a", "", 3, 1, 1.0), Outcome("b", "exit code 1: no", 0, 0, 1.0)


def test_a_table_counts_what_ran() -> None:
    text = table(FIRST, [GOOD, BAD, None])
    assert text.startswith(f"1 of 3 {FIRST.name} run unmodified.\n\n| program |")
    rows = text.splitlines()[4:]
    assert rows[0] == "| `a.train` | trains and saves | 3 | 1 | the dataset |"
    assert "exit code 1: no" in rows[1] and "left: no images" in rows[2]
    waiting = table(FIRST, [GOOD, None, None])
    assert "| `b` | not run |" in waiting and "\n\n1 have not been run yet.\n\n" in waiting
    assert "not been run" not in text


def test_a_new_table_takes_the_place_of_its_own() -> None:
    page = f"# Before\n\n{MARK}\n\n"
    page = with_table(page, SECOND, [GOOD, GOOD, None])
    page = with_table(page, FIRST, [BAD, BAD, None])
    second = table(SECOND, [GOOD, GOOD, None])
    assert page == f"# Before\n\n{MARK}\n\n{table(FIRST, [BAD, BAD, None])}\n{second}"
    assert (
        with_table(with_table(f"{MARK}\n", FIRST, [BAD, BAD, None]), SECOND, [GOOD, GOOD, None])
        == page.partition("\n\n")[2]
    )
    assert with_table(page, FIRST, [GOOD, GOOD, None]).endswith(f"\n\n{table(FIRST, [GOOD, GOOD, None])}\n{second}")


def test_a_program_that_was_not_run_keeps_its_row() -> None:
    page = with_table(f"{MARK}\n", FIRST, [GOOD, BAD, None])
    kept = with_table(page, FIRST, [BAD, None, None])
    assert kept == with_table(f"{MARK}\n", FIRST, [BAD, BAD, None])
    assert (
        with_table(page, FIRST, [None, Outcome("b", "", 0, 0, 1.0), None]).partition(MARK)[2].startswith("\n\n2 of 3 ")
    )


def test_the_page_has_a_place_for_them() -> None:
    assert PAGE.read_text(encoding="utf-8").count(MARK) == 1
