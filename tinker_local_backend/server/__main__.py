"""Serve base models to the Tinker SDK.

python -m tinker_local_backend.server model=Qwen/Qwen3-4B-Instruct-2507
python -m tinker_local_backend.server models=A,B host=0.0.0.0 port=8000 api_keys_file=keys.txt
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from tinker_local_backend.command import fail, parse
from tinker_local_backend.errors import EngineClosedError, LocalBackendError
from tinker_local_backend.replicas.launch import refuse
from tinker_local_backend.server.config import ServerConfig

INSTALL = "pip install 'fastapi>=0.115' 'httptools>=0.6.4' 'prometheus-client>=0.20' 'uvicorn>=0.36' 'uvloop>=0.21'"
"""The extra `server` of pyproject.toml."""


_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextmanager
def without_torch() -> Generator[None]:
    """Block imports of torch inside the context. The SDK's types and transformers' tokenizers import it if it is installed, which
    costs 180 MiB and two seconds, and work without it. This process computes nothing; the engine runs in another one
    (engine_process.py). Code that needs torch later, such as the first chat that must call a tool, imports it then.
    """
    modules = cast(dict[str, Any], sys.modules)
    if "torch" in modules:
        yield
        return
    before = os.environ.get(_NO_ADVICE)
    modules["torch"], os.environ[_NO_ADVICE] = None, "1"  # silence the warning that torch is missing
    try:
        yield
    finally:
        del modules["torch"], os.environ[_NO_ADVICE]
        if before is not None:
            os.environ[_NO_ADVICE] = before


def main(config: ServerConfig) -> None:
    try:
        refuse("the server")
        with without_torch():
            from tinker_cookbook.serving.formats import ServedFormats
            from tinker_local_backend.server.run import serve
    except LocalBackendError as error:
        fail(error)
    except ModuleNotFoundError as error:
        fail(f"{error}; the server needs more packages: {INSTALL}")
    try:
        formats = ServedFormats(config.chat)
    except ValueError as error:
        fail(str(error))
    try:
        serve(config, formats)
    except EngineClosedError as error:
        fail(error, code=1)
    except LocalBackendError as error:
        fail(error)


if __name__ == "__main__":
    main(parse(ServerConfig))
