"""The clients' methods against those of the SDK, name by name: exactly what differs is in the table of docs/ecosystem.md."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from tinker_local_backend import hosted_only
from tinker_local_backend.binding import CLIENTS
from tinker_local_backend.hosted_only import AdminClient
from tinker_local_backend.rest_client import RestClient

DOC = Path(__file__).parents[2] / "docs" / "ecosystem.md"
REFUSED_BY_NAME = (RestClient, AdminClient)
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def is_refused(client: type, name: str) -> bool:
    return client in REFUSED_BY_NAME and name.removesuffix("_async") in hosted_only.REST_CALLS


def differences(client: type) -> Iterator[str]:
    """Public names of the SDK's class that are missing, refused, or take other arguments. More arguments are no difference."""
    theirs = getattr(tinker, client.__name__)
    for name in (name for name in dir(theirs) if not name.startswith("_")):
        if is_refused(client, name) or not hasattr(client, name):
            if not name.endswith("_async"):
                yield f"{client.__name__}.{name}"
            continue
        wanted, found = parameters(getattr(theirs, name)), parameters(getattr(client, name))
        in_order = [key for key, p in wanted.items() if p.kind is POSITIONAL]
        same = [key for key, p in found.items() if p.kind is POSITIONAL][: len(in_order)] == in_order
        if not same or any(key not in found or found[key].default != p.default for key, p in wanted.items()):
            yield f"{client.__name__}.{name}"


def table() -> dict[str, str]:
    """The rows of the table "Calls of the SDK" in the docs: name -> what is so here."""
    section = DOC.read_text(encoding="utf-8").partition("## Calls of the SDK")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`([A-Za-z_.]+)`", names)}


def test_what_differs_from_the_sdk_is_in_the_docs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK warns of deprecated names
        found = [difference for client in CLIENTS for difference in differences(client)]
    assert sorted(found) == sorted(table())


@pytest.mark.parametrize("name", hosted_only.REST_CALLS)
def test_calls_of_the_hosted_service_are_refused_by_name(name: str, tmp_path: Path) -> None:
    clients = [RestClient(tmp_path), *([AdminClient()] if hasattr(tinker.AdminClient, name) else [])]
    for client in clients:
        for called in (name, f"{name}_async"):
            with pytest.raises(tinker.BadRequestError, match=f"{name} has no meaning"):
                getattr(client, called)()
        with pytest.raises(AttributeError):
            client.get_everything()  # pyright: ignore[reportAttributeAccessIssue]


def test_every_call_of_administrators_is_known() -> None:
    names = {name.removesuffix("_async") for name in dir(tinker.AdminClient) if not name.startswith("_")}
    assert names - {"get_telemetry"} <= hosted_only.REST_CALLS.keys()
