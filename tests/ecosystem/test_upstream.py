"""tinker-cookbook's own tests of its public API on this library: as many pass as the last time, at least."""

from pathlib import Path

import pytest

from tests.ecosystem.package import IndexUnreachableError
from tests.ecosystem.upstream import read_report, run_release

pytestmark = pytest.mark.ecosystem

PASSED = 1200
"""docs/ecosystem.md says what the others are."""


def test_its_tests_pass(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    try:
        results = run_release(tmp_path / "release", log)
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    failed = "\n".join(f"{name}: {why}" for name, why in results.failed.items())
    assert len(results.passed) >= PASSED, f"{failed}\n{log.read_text()[-3000:]}"


def test_what_a_report_says(tmp_path: Path) -> None:
    cases = [
        '<testcase classname="a.T" name="good"/>',
        '<testcase classname="a.T" name="bad"><failure message="no&#10;more">text</failure></testcase>',
        '<testcase classname="" name="broken"><error message="cannot import"/></testcase>',
        '<testcase classname="a.T" name="not"><skipped message="offline"/></testcase>',
    ]
    (tmp_path / "r.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    results = read_report(tmp_path / "r.xml")
    assert results.passed == ["a.T::good"] and results.skipped == ["a.T::not"]
    assert results.failed == {"a.T::bad": "no", "::broken": "cannot import"}
