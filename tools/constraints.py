"""Check that the pinned versions of constraints.txt resolve with every extra of pyproject.toml. Installs nothing.

    make constraints        or        python -m tools.constraints only=inspect,wandb

Packages that conflict with the pinned versions are listed at the end, with the reason.
Takes minutes, and needs a package index. Exits with 1 if an extra does not resolve.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
PIP = (
    sys.executable,
    "-m",
    "pip",
    "install",
    "--dry-run",
    "--ignore-installed",
    "--disable-pip-version-check",
)
LINES_SHOWN = 12
EXCLUDED = """vLLM is not an extra: it pins another torch, and has its own environment (docs/vllm.md)
litellm is not an extra: it needs openai below 3, and has its own environment (make test-server)
neptune-scale is not an extra: it needs protobuf below 6, and the pinned versions are tested with 7"""


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.constraints`."""

    only: tuple[str, ...] = chz.field(default=(), doc="check only these extras; default: all")


def extras() -> list[str]:
    """The extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"])


def resolve(extra: str) -> str | None:
    """None if pip resolves this extra with the pinned versions, else the end of its output."""
    command = [*PIP, "-c", "constraints.txt", "-e", f".[{extra}]"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join(lines[-LINES_SHOWN:])  # before its last error pip names the conflicting requirements


def main(config: CLIConfig) -> None:
    if unknown := set(config.only) - set(extras()):
        raise ConfigurationError(f"only={','.join(sorted(unknown))}: there are {', '.join(extras())}")
    failed = []
    for extra in config.only or extras():
        failure = resolve(extra)
        print(f"{'ok   ' if failure is None else 'FAILED'}  {extra}", flush=True)
        if failure is not None:
            print(failure, file=sys.stderr, flush=True)
            failed.append(extra)
    print(EXCLUDED)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
