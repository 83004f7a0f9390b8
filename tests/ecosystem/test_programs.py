"""Public programs of tinker-cookbook, unmodified, on the local engine: each does what its entry of the table says.

`make test-ecosystem` runs them; the packages come from the index and are thrown away afterwards.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ecosystem.__main__ import places
from tests.ecosystem.package import IndexUnreachableError
from tests.ecosystem.running import Place, run_program
from tests.ecosystem.table import RECIPES, SUITES, Program, Suite

pytestmark = pytest.mark.ecosystem

OF_BOTH_LIBRARIES = "0.6.1"
PROMISED = {suite.name: count for suite, count in zip(SUITES, (18, 18, 18, 21, 18), strict=True)}
"""Programs of each suite that are started, at least. Each must run; docs/ecosystem.md says which have been seen to."""


NOT_LOGGED = {"batch_time", "time/infrequent_evals"}
"""Metrics of theirs that a row here does not have, besides `cost/`: docs/ecosystem.md says why."""


@pytest.fixture(scope="module")
def logged() -> dict[tuple[bool, str], frozenset[str]]:
    """By library and recipe of 0.6.1, the metrics that it logged; filled as programs run."""
    return {}


@pytest.fixture(scope="module")
def by_version() -> Iterator[dict[str, Place]]:
    try:
        with places() as found:
            yield found
    except IndexUnreachableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_as_many_are_started_as_are_promised(suite: Suite) -> None:
    assert sum(not program.left for program in suite.programs) >= PROMISED[suite.name]


@pytest.mark.parametrize(
    ("suite", "program"),
    [(suite, program) for suite in SUITES for program in suite.programs if not program.left],
    ids=lambda value: value.name,
)
def test_a_public_program_runs(
    suite: Suite,
    program: Program,
    by_version: dict[str, Place],
    logged: dict[tuple[bool, str], frozenset[str]],
    tmp_path: Path,
) -> None:
    outcome = run_program(suite, program, by_version[suite.version], tmp_path)
    assert outcome.problem == "", (tmp_path / "output.txt").read_text()[-3000:]
    if suite.version == OF_BOTH_LIBRARIES:
        logged[suite.own_library, program.name] = outcome.metrics


@pytest.mark.parametrize("name", [program.name for program in RECIPES if program.log_paths])
def test_rows_have_the_metrics_of_theirs(name: str, logged: dict[tuple[bool, str], frozenset[str]]) -> None:
    if not {(True, name), (False, name)} <= logged.keys():
        pytest.skip("the recipe did not run on both libraries")
    absent = logged[True, name] - logged[False, name] - NOT_LOGGED
    assert not {metric for metric in absent if not metric.startswith("cost/")}
