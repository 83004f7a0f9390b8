"""A server and a training run on Modal, from a checkout:

    modal secret create tinker-local-keys TINKER_LOCAL_API_KEYS=alice=tml-...
    modal deploy deploy/modal_app.py              # serves; prints its https address, which is TINKER_BASE_URL
    modal run deploy/modal_app.py::train          # trains

One container serves: it holds the sessions. Modal ends it, and them, when nobody has asked for anything for `scaledown_window`.
Checkpoints stay in the volume.
"""

import os
import subprocess
from pathlib import Path

import modal

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
STATE = "/state"
PORT = 8000

checkout = Path(__file__).resolve().parents[1]
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")
    .env({"PYTHONUNBUFFERED": "1", "HF_HOME": f"{STATE}/cache", "TINKER_LOCAL_HOME": f"{STATE}/home"})
    .add_local_dir(
        checkout, "/opt/tinker-local", copy=True, ignore=[".git", "**/__pycache__", ".venv*", "tests", "docs"]
    )
    .workdir("/opt/tinker-local")
    .run_commands("pip install --constraint constraints.txt --editable '.[server]'")
)
app = modal.App("tinker-local", image=image)
volume = modal.Volume.from_name("tinker-local", create_if_missing=True, version=2)

SERVE = [
    "python",
    "-m",
    "tinker_local_backend.server",
    f"model={MODEL}",
    "host=0.0.0.0",
    f"port={PORT}",
    "access_log=-",
]
TRAIN = ["python", "-m", "recipes.rl_basic", f"model_name={MODEL}", f"log_path={STATE}/runs/first"]
TRAIN += ["behavior_if_log_dir_exists=resume"]


@app.function(
    gpu="H100",
    volumes={STATE: volume},
    secrets=[modal.Secret.from_name("tinker-local-keys", required_keys=["TINKER_LOCAL_API_KEYS"])],
    max_containers=1,
    scaledown_window=1800,
    timeout=24 * 3600,
)
@modal.concurrent(max_inputs=1000)
@modal.web_server(PORT, startup_timeout=1200)
def serve() -> None:
    """Modal waits until the port is open, and clients for the models: the server answers 503 until they are loaded."""
    subprocess.Popen(SERVE)


@app.function(gpu="H100", volumes={STATE: volume}, timeout=24 * 3600, retries=3)
def train() -> None:
    """A container that is taken away starts again, and the run goes on from its last checkpoint."""
    try:
        subprocess.run(TRAIN, check=True, env={**os.environ})
    finally:
        volume.commit()
