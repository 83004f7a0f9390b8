"""Serve base models to the Tinker SDK.

python -m tinker_local_backend.server model=Qwen/Qwen3-4B-Instruct-2507
python -m tinker_local_backend.server models=A,B host=0.0.0.0 port=8000 api_keys_file=keys.txt
"""

from tinker_local_backend.command import fail, parse
from tinker_local_backend.errors import EngineClosedError, LocalBackendError
from tinker_local_backend.replicas.launch import refuse
from tinker_local_backend.server.config import ServerConfig

INSTALL = "pip install 'fastapi>=0.115' 'httptools>=0.6.4' 'prometheus-client>=0.20' 'uvicorn>=0.36' 'uvloop>=0.21'"
"""The extra `server` of pyproject.toml."""


def main(config: ServerConfig) -> None:
    try:
        refuse("the server")
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
