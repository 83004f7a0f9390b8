"""Training under FakeTensor, in processes of their own: forward, backward and the optimizer's step of every loss, with the
varlen plan and shared prefixes, with layers kept and recomputed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import HANG_SECONDS
from tinker_local_backend.engine.training.losses import LOSSES

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("fake_gpu.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA: its own device is there"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (apt-get install g++)"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device without a device, compiled for this torch."""
    target, torch_home = tmp_path_factory.mktemp("fake-gpu") / "fake_gpu.so", Path(torch.__file__).parent
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", f"-I{torch_home}/include", f"-L{torch_home}/lib"]
    links = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_home}/lib"]
    command = [str(COMPILER), *options, str(SOURCE), "-o", str(target), *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def train(library: Path, model: str, *plant: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.engine.cuda.fake_training", model, *plant]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


def test_training_stays_on_the_device_and_reads_once_per_pass_and_call(library: Path, untied_model: str) -> None:
    done = train(library, untied_model)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2 * len(LOSSES), "every loss, with layers kept and recomputed"


@pytest.mark.parametrize(
    ("plant", "message"),
    [("read", "DynamicOutputShapeException"), ("cpu", "at least two devices|different devices"), ("copy", "copies from the GPU")],
)  # fmt: skip
def test_what_is_planted_in_a_pass_is_caught(library: Path, untied_model: str, plant: str, message: str) -> None:
    done = train(library, untied_model, plant)
    assert done.returncode != 0
    assert any(part in done.stderr for part in message.split("|")), done.stderr[-3000:]
