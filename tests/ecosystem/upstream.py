"""Tests of tinker-cookbook's own, of its public API, run on this library: unpacked from the source distribution and thrown away.

python -m tests.ecosystem.upstream        runs them and says what fails
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.child import ROOT
from tests.ecosystem.package import NEEDED, install, unpack_release
from tests.waiting import HANG_SECONDS

VERSION = "0.6.1"
DOWNSTREAM = "tests/downstream_compat"
"""A folder of tests of what others import."""
NOT_RUN = ("test_install_skills.py",)
"""Of that folder: of a command that installs prompts for coding agents."""
MODULES = (
    "cli_utils", "completers", "exceptions", "model_info", "renderers/parse_failure", "rl/message_env", "rl/min_viable_group",
    "rl/multiturn_weight_assignment", "rl/rollout_executor", "rl/rollout_limits", "rl/rollout_presets", "rl/rollout_runner",
    "rl/termination_reward", "stores/eval_store", "stores/storage", "third_party/openai_compat",
    "tool_use/agent_tool_message_env", "tool_use/tool_execution", "utils/git_rev", "utils/logtree",
)  # fmt: skip
"""Modules whose tests beside them are of public names as well."""
NEEDED_BY_TESTS = ("pytest-asyncio", "pytest-timeout")
SETTINGS = """[pytest]
python_files = *_test.py test_*.py
asyncio_default_fixture_loop_scope = function
markers =
    downstream_compat: of what others import
    slow: takes long
    integration: needs a service
"""


@dataclass(frozen=True)
class Results:
    """What became of the tests, by `file::name`."""

    passed: list[str]
    failed: dict[str, str]
    """and the first line of why"""
    skipped: list[str]


def lay_out(sources: Path, folder: Path) -> None:
    """Put the tests of unpacked sources into a folder, flat, so that none of the package beside them can be imported."""
    shutil.copytree(sources / DOWNSTREAM, folder / DOWNSTREAM, ignore=shutil.ignore_patterns(*NOT_RUN))
    (folder / "tests" / "__init__.py").touch()
    for module in MODULES:
        text = sources / "tinker_cookbook" / f"{module}_test.py"
        shutil.copy(text, folder / f"t_{module.replace('/', '_')}_test.py")
    (folder / "pytest.ini").write_text(SETTINGS)


def run(folder: Path, packages: Path, log: Path) -> Results:
    """Run what `lay_out` has put into a folder, on this checkout.

    `packages`: where NEEDED and NEEDED_BY_TESTS are. `log`: takes what pytest says.
    """
    report = folder / "report.xml"
    paths = [str(ROOT), str(folder), str(packages), os.environ.get("PYTHONPATH", "")]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [
        "-q",
        "--tb=line",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    arguments += ["--timeout", str(HANG_SECONDS), f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", ".", *arguments],
        cwd=folder,
        env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=2 * HANG_SECONDS,
    )
    log.write_text(done.stdout + done.stderr)
    return read_report(report)


def read_report(report: Path) -> Results:
    """pytest's report in JUnit's form."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    skipped: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [*case.iter("failure"), *case.iter("error")]
        if wrong:
            failed[name] = re.split(r"\n", wrong[0].get("message") or "")[0]
        elif case.find("skipped") is not None:
            skipped.append(name)
        else:
            passed.append(name)
    return Results(passed, failed, skipped)


def run_release(folder: Path, log: Path) -> Results:
    """Download sources and packages below a folder, and run the tests. Raises IndexUnreachableError."""
    install(folder / "packages", (*NEEDED, *NEEDED_BY_TESTS))
    release = unpack_release(folder / "release", VERSION)
    (folder / "flat").mkdir()
    lay_out(release.sources, folder / "flat")
    return run(folder / "flat", folder / "packages", log)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        results = run_release(Path(name), Path(name, "log.txt"))
    for test, why in results.failed.items():
        print(f"{test}: {why}")
    print(f"{len(results.passed)} passed, {len(results.failed)} failed, {len(results.skipped)} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
