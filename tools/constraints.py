"""Do the pinned versions of constraints.txt install with every extra of pyproject.toml? pip resolves each, and installs nothing.

    make constraints        or        python -m tools.constraints only=inspect,wandb

What cannot stand beside the pinned versions is named at the end, with the reason.
Minutes long, and needs a package index. Ends with exit code 1 when an extra does not resolve.
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
APART = """vLLM is no extra: it pins a torch of its own and has its own environment (docs/vllm.md)
litellm is no extra: it needs openai below 3, and has its own environment (make test-server)
neptune-scale is no extra: it needs protobuf below 6, the pinned versions are tested with 7"""


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.constraints`."""

    only: tuple[str, ...] = chz.field(default=(), doc="these extras alone; default: all")


def extras() -> list[str]:
    """The extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"])


def resolve(extra: str) -> str | None:
    """None where pip finds versions for this extra beside the pinned ones; else what it says."""
    command = [*PIP, "-c", "constraints.txt", "-e", f".[{extra}]"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join(lines[-LINES_SHOWN:])  # before its last error pip says which two requirements are at odds


def main(config: CLIConfig) -> None:
    if unknown := set(config.only) - set(extras()):
        raise ConfigurationError(f"only={','.join(sorted(unknown))}: there are {', '.join(extras())}")
    failed = []
    for extra in config.only or extras():
        refusal = resolve(extra)
        print(f"{'ok   ' if refusal is None else 'FAILED'}  {extra}", flush=True)
        if refusal is not None:
            print(refusal, file=sys.stderr, flush=True)
            failed.append(extra)
    print(APART)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
