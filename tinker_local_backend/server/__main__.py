"""Serve base models to the Tinker SDK.

python -m tinker_local_backend.server model=Qwen/Qwen3-4B-Instruct-2507
python -m tinker_local_backend.server models=A,B host=0.0.0.0 port=8000 api_keys_file=keys.txt
"""

import os
import sys
from typing import Any, cast

from tinker_local_backend.command import fail, parse
from tinker_local_backend.errors import EngineClosedError, LocalBackendError
from tinker_local_backend.replicas.launch import refuse
from tinker_local_backend.server.config import ServerConfig

INSTALL = "pip install 'fastapi>=0.115' 'httptools>=0.6.4' 'prometheus-client>=0.20' 'uvicorn>=0.36' 'uvloop>=0.21'"
"""The extra `server` of pyproject.toml."""


_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def without_torch() -> None:
    """Keep torch out of this process, which computes nothing: the engine has one of its own (engine_process.py). The SDK's types
    and transformers' tokenizers import torch where it can be had, for 180 MiB and two seconds, and do without it otherwise.
    """
    cast(dict[str, Any], sys.modules).setdefault("torch", None)
    before = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"  # that there is no torch is not news
    import transformers  # noqa: F401

    if before is None:
        del os.environ[_NO_ADVICE]
    else:
        os.environ[_NO_ADVICE] = before


def main(config: ServerConfig) -> None:
    try:
        refuse("the server")
        without_torch()
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
