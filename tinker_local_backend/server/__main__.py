"""Serve base models to the Tinker SDK.

python -m tinker_local_backend.server model=Qwen/Qwen3-4B-Instruct-2507
python -m tinker_local_backend.server models=A,B host=0.0.0.0 port=8000 api_keys_file=keys.txt
"""

import re
import sys

import chz

from tinker_local_backend.errors import LocalBackendError
from tinker_local_backend.replicas.launch import refuse
from tinker_local_backend.server.config import ServerConfig


def main(config: ServerConfig) -> None:
    try:
        refuse("the server")
        from tinker_local_backend.server.run import serve
    except LocalBackendError as error:
        sys.exit(str(error))
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; the server needs its extra: pip install 'tinker-cookbook-local[server]'")
    try:
        serve(config)
    except LocalBackendError as error:
        sys.exit(str(error))


def parse() -> ServerConfig:
    """The config of the command line. A value that is out of range is told in one line."""
    try:
        return chz.entrypoint(ServerConfig)
    except ValueError as error:
        sys.exit(re.sub(r"^Expected X_(\w+) to ", r"\1 must ", str(error)))


if __name__ == "__main__":
    main(parse())
