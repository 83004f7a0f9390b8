"""Two processes as torchrun starts them, without its watch: a test may kill one and see what the other does."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environments(**variables: str) -> list[dict[str, str]]:
    """Of rank 0 and rank 1, with these variables for both."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), **variables}
    return [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
