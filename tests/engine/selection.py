"""Which tests run on the session's device: hooks of pytest that conftest.py takes over.

What holds on the CPU alone is deselected elsewhere, counted and said, with and without pytest-xdist.
"""

from typing import Any

import pytest

from tests.engine.architectures import models_under_test, runs_chosen
from tests.engine.captured import FOLDER, runs_captured
from tests.engine.devices import PlaceError, here

DESELECTED = pytest.StashKey[int]()
"""How many tests were left out as promises of the CPU."""


def pytest_configure() -> None:
    try:
        here()
        models_under_test()
    except PlaceError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that hold on the CPU alone, if this is another device, those that the CUDA path need not run, and
    those of other architectures than the environment names.
    """
    left_out = [
        item
        for item in items
        if not (here().runs({mark.name for mark in item.iter_markers()}) and runs_chosen(item))
        or (here().captured and item.path.parent == FOLDER and not runs_captured(item.path.stem, _name(item)))
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[DESELECTED] = len(left_out)


def _name(item: pytest.Item) -> str:
    """Without its parameters."""
    return getattr(item, "originalname", None) or item.name


def summary(config: pytest.Config) -> str:
    """Where the tests of this folder run, and how many of them do not."""
    why = "promises of the CPU (cpu_promise)" + (" or named in captured.py" if here().captured else "")
    return f"engine tests on {here()}; {config.stash.get(DESELECTED, 0)} deselected as {why}"


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [] if here().is_reference else [summary(config)]


# Under pytest-xdist only the workers collect. Each tells the main process, which says it once, at the end.


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["engine_deselected"] = session.config.stash.get(DESELECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("engine_deselected")
    if told is not None:
        node.config.stash[DESELECTED] = told


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession") and not here().is_reference:
        terminalreporter.write_line(summary(config))
