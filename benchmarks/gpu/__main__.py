"""One command that checks correctness and measures speed on a GPU, in ten minutes at most.

    python -m benchmarks.gpu                  # on a GPU: real shapes; elsewhere: tiny ones, to try the command
    python -m benchmarks.gpu only=correctness,decoding seconds=200      # the report keeps its other sections

Every section runs in its own process, within its share of the time, and writes to the report after every row, so a crash, a
hang or a timeout loses nothing else. Exit code 0: every check passed. 1: one failed, or was not reached. Without a GPU the CUDA
path runs with its stand-ins (stand_ins.py), and the numbers are not measurements.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import chz
import torch

from benchmarks.config import RESULTS
from benchmarks.errors import BenchmarkError
from benchmarks.gpu.findings import COMPLETE, RUNNING, Findings, describe
from benchmarks.gpu.scale import SCALES, Scale
from benchmarks.gpu.stand_ins import stand_ins
from benchmarks.gpu.visit import SECTIONS, Section, Visit
from benchmarks.gpu.visit_report import VisitReport
from tinker_cookbook.utils.fields import positive_or_none
from tinker_local_backend.command import check_command
from tinker_local_backend.errors import LocalBackendError

POLL_SECONDS = 0.5
SHARE_BEFORE_KILL = 0.85
"""share of its time after which a section starts nothing new; at the end of its time the process is killed"""

SECONDS = {"cuda": 600.0, "cpu": 3600.0}
"""Default time for all sections, by device."""


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.gpu`."""

    seconds: float | None = chz.field(
        default=None,
        doc="time for all sections, divided by their shares. Default: 600 on a GPU; 3600 elsewhere, of which an idle core needs "
        "a quarter",
        validator=positive_or_none,
    )
    device: Literal["auto", "cuda", "cpu"] = chz.field(default="auto", doc="auto: cuda when torch sees one, else cpu")
    scale: Literal["auto", "full", "tiny"] = chz.field(
        default="auto",
        doc="full: Qwen3-0.6B and 4B shapes; tiny: a trial, a quarter of an hour on a CPU; auto: full on cuda",
    )
    only: list[str] | None = chz.field(
        default=None,
        doc=f"sections to run, separated by commas: {', '.join(s.name for s in SECTIONS)}; default: all. The report keeps "
        "the other sections' results from an earlier visit with this machine and commit",
    )
    rank: int = chz.field(default=16, doc="rank of the LoRA adapters", validator=chz.validators.gt(0))
    threads: int = chz.field(default=1, doc="CPU threads of a section on a CPU", validator=chz.validators.gt(0))
    vllm_python: str | None = chz.field(
        default=None, doc="python of an environment with vLLM, to compare with (see benchmarks/README.md)"
    )
    output: str = chz.field(default=RESULTS, doc="folder for the report (JSON and markdown)")


def main(config: Config) -> int:
    """Run the sections, print and write the report. Returns the exit code."""
    sections = chosen_sections(config.only)
    device = _device(config.device)
    scale = SCALES[config.scale if config.scale != "auto" else ("full" if device == "cuda" else "tiny")]
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    report = VisitReport.start(device, scale.name, config.threads, sections, config.output)
    deadline = time.monotonic() + (config.seconds or SECONDS[device])
    for i, section in enumerate(sections):
        left = deadline - time.monotonic()
        limit = left * section.share / sum(other.share for other in sections[i:])
        print(f"\n[{i + 1}/{len(sections)}] {section.title} (up to {limit:.0f} s)", flush=True)
        found = run_section(section, config, device, scale, limit, report)
        print(f"  {found.status}, {found.seconds:.0f} s", flush=True)
    print()
    report.show()
    for path in report.write():
        print(f"wrote {path}")
    problems = report.problems()
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def chosen_sections(only: list[str] | None) -> list[Section]:
    """All sections, or the named ones, most important first. Raises BenchmarkError for an unknown name."""
    names = [section.name for section in SECTIONS]
    unknown = [name for name in only or [] if name not in names]
    if unknown:
        raise BenchmarkError(f"only={','.join(unknown)}: no such section; there are {', '.join(names)}")
    return [section for section in SECTIONS if only is None or section.name in only]


def _device(wanted: str) -> str:
    """`cpu` or `cuda`. torch is queried in another process, because this one forks, which a process that has used CUDA cannot."""
    if wanted == "cpu":
        return "cpu"
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stdout.strip() == "True":
        return "cuda"
    if wanted == "cuda":
        raise BenchmarkError("device=cuda: torch sees no CUDA device here; use device=cpu")
    return "cpu"


def run_section(
    section: Section,
    config: Config,
    device: str,
    scale: Scale,
    limit: float,
    report: VisitReport,
) -> Findings:
    """Run one section in its own process; the report is written whenever the section has new results."""
    with tempfile.TemporaryDirectory(prefix="tinker-gpu-") as folder:
        path = Path(folder) / "findings.json"
        Findings(section.name, path, limit).save()
        context: Any = multiprocessing.get_context(_start_method())
        process = context.Process(
            target=_in_child, args=(section, config, device, scale, report.rates, limit * SHARE_BEFORE_KILL, path)
        )
        process.start()
        end, seen = time.monotonic() + limit, 0.0
        while process.is_alive() and time.monotonic() < end:
            process.join(POLL_SECONDS)
            if path.stat().st_mtime != seen:
                seen = path.stat().st_mtime
                report.add(Findings.read(path))
        killed = process.is_alive()
        if killed:
            _kill(process)
        found = Findings.read(path)
    if found.status == RUNNING:
        end_of_process = "its time was up" if killed else f"its process ended with code {process.exitcode}"
        found = replace(found, status=f"cut off: {end_of_process}")
    report.add(found)
    return found


def _start_method() -> Literal["fork", "spawn"]:
    """fork, which saves every section its imports, unless an imported module has already used the CUDA driver."""
    probe = multiprocessing.get_context("fork").Process(target=_exit_if_cuda_is_unusable)
    probe.start()
    probe.join()
    return "fork" if probe.exitcode == 0 else "spawn"


def _exit_if_cuda_is_unusable() -> None:
    os._exit(int(torch.cuda._is_in_bad_fork()))


def _kill(process: Any) -> None:
    """Kill the section's process and all its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _in_child(
    section: Section, config: Config, device: str, scale: Scale, rates: dict[str, float], limit: float, path: Path
) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(config.threads if device == "cpu" else 4)
    findings = Findings(section.name, path, limit)
    on = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    try:
        with stand_ins():
            section.run(Visit(on, scale, config.rank, findings, rates, config.vllm_python))
        findings.status = COMPLETE
    except BaseException as error:
        traceback.print_exc()
        findings.status = f"failed: {describe(error)}"
    findings.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a broken device must not hang the exit of the process


if __name__ == "__main__":
    check_command()
    try:
        raise SystemExit(chz.nested_entrypoint(main, allow_hyphens=True))
    except (BenchmarkError, LocalBackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
