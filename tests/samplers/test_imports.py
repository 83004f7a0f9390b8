"""What vLLM's processes import of the engine: their environment has numpy and torch, and none of this project's packages."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_SECONDS

SCRIPT = """
import importlib, sys, types

ABSENT = ("tinker", "transformers", "chz", "peft", "datasets", "tinker_cookbook")
for name in ABSENT:
    sys.modules[name] = None  # importing it fails
for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.sampler", "vllm.v1.kv_cache_interface"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.v1.sample.sampler"].Sampler = object
sys.modules["vllm.v1.kv_cache_interface"].KVCacheConfig = type("KVCacheConfig", (), {})
worker = importlib.machinery.SourceFileLoader("vllm_worker", sys.argv[1]).load_module()
sampling = importlib.import_module(worker.SAMPLING)
print(sampling.WorkerExtension.__name__, *sorted(name for name in sys.modules if name.startswith(worker.PACKAGE + ".")))
"""


def test_sampling_in_vllm_needs_numpy_and_torch_alone() -> None:
    root = Path(__file__).parents[2]
    worker = root / "tinker_local_backend" / "samplers" / "vllm_worker.py"
    child = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(worker)], capture_output=True, text=True, timeout=HANG_SECONDS, env={}
    )
    assert child.returncode == 0, child.stderr
    extension, *modules = child.stdout.split()
    assert extension == "WorkerExtension"
    assert "tinker_local_backend.engine.sampling.token_choice" in modules
    assert len(modules) < 10  # those, and the operation that applies limits on a GPU
