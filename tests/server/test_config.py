"""Each key of the server's config is bounded, and read by the server."""

import ast
from pathlib import Path
from typing import Any

import chz
import pytest

from tinker_local_backend.server import config as config_module
from tinker_local_backend.server.config import ServerConfig

FIELDS = chz.chz_fields(ServerConfig)
NUMBERS = [name for name, field in FIELDS.items() if field.final_type in (int, float, int | None, float | None)]
LOWEST = {"port": -1, "shutdown_seconds": -0.5, "fetch_seconds": -0.5, "silent_seconds": 10.0}
"""Largest values that are refused; of other numbers it is 0."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_lower_bound(name: str) -> None:
    kind = float if FIELDS[name].final_type in (float, float | None) else int
    refused = LOWEST.get(name, 0)
    below: dict[str, Any] = {name: kind(refused)}
    above: dict[str, Any] = {name: kind(refused + 1)}
    with pytest.raises(ValueError, match=name):
        ServerConfig(**below)
    assert getattr(ServerConfig(**above), name) == above[name]


def test_every_key_is_read_outside_of_the_config_or_by_its_properties() -> None:
    path = Path(config_module.__file__)
    own = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))
    trees = [ast.parse(file.read_text()) for file in path.parent.glob("*.py") if file != path]
    properties = [node for node in own.body if isinstance(node, ast.FunctionDef)]
    read = {n.attr for tree in [*trees, *properties] for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    by_name = {"tls_certfile", "tls_keyfile"} & {
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    assert len(NUMBERS) > 25
    assert set(FIELDS) - read - by_name == set()
