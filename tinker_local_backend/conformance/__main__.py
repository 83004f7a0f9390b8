"""Check a server of the Tinker protocol with the unmodified official SDK.

    python -m tinker_local_backend.conformance base_url=http://127.0.0.1:8000
    python -m tinker_local_backend.conformance base_url=http://gpu-machine:8000 api_key=tml-... model=Qwen/Qwen3-4B json=rows.json

Prints a line per check: passed; failed, with the expected result; or refused, if the server says that it does not offer an
optional feature. Exits with 0 if nothing failed. Each check makes a few small clients (rank 8, some dozens of tokens) in its
own session, which it closes; the checkpoints that it saves stay, under names with a random suffix.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import chz
import tinker

from tinker_local_backend.command import fail, parse, run
from tinker_local_backend.conformance import (
    checks_checkpoints,
    checks_errors,
    checks_losses,
    checks_rest,
    checks_sampling,
    checks_training,
    harness,
)
from tinker_local_backend.conformance.harness import Check, Row, describe
from tinker_local_backend.conformance.probe import Target

CHECKS: tuple[Check, ...] = tuple(
    check
    for module in (checks_training, checks_losses, checks_sampling, checks_checkpoints, checks_rest, checks_errors)
    for check in module.CHECKS
)
ANY_KEY = "tml-local-anything"


def _positive(config: object, name: str) -> None:
    if (value := getattr(config, name)) is not None and value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.conformance`."""

    base_url: str | None = chz.field(default=None, doc="the server's address; default: TINKER_BASE_URL")
    api_key: str | None = chz.field(
        default=None, doc="default: TINKER_API_KEY, else any key, which servers without keys accept"
    )
    model: str | None = chz.field(
        default=None, doc="base model; default: the first that the server's capabilities list"
    )
    tokenizer: str | None = chz.field(
        default=None, doc="directory or hub id of its tokenizer; default: the one that the server names"
    )
    checks: list[str] | None = chz.field(default=None, doc="names of checks, or parts of names; default: all")
    json: str | None = chz.field(default=None, doc="file to write the rows to")
    seconds: float | None = chz.field(
        default=None, doc="time limit of each check; default: 120, of errors 40", validator=_positive
    )
    tolerance: float = chz.field(
        default=0.05,
        doc="largest mean difference of logprobs between sampler and trainer; 0.05 suits bfloat16, 0.001 float32",
        validator=chz.validators.gt(0),
    )


def chosen(names: list[str] | None) -> list[Check]:
    """The checks whose names contain one of `names`. Exits with an error for a name that fits none."""
    for name in names or []:
        if not any(name in check.name for check in CHECKS):
            fail(f"checks: no check is named {name!r}; there are {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if names is None or any(name in check.name for name in names)]


def target(config: Config) -> Target:
    """The server of a config. Exits with an error if there is no address, or if the server does not answer."""
    address = config.base_url or os.environ.get("TINKER_BASE_URL")
    if address is None:
        fail("base_url is not set, nor is TINKER_BASE_URL; give the server's address, such as http://127.0.0.1:8000")
    key = config.api_key or os.environ.get("TINKER_API_KEY") or ANY_KEY
    server = Target(address.rstrip("/"), key, config.model or "", config.tokenizer, config.tolerance)
    if config.model is not None:
        return server
    try:
        models = server.rest().get_server_capabilities().result().supported_models
    except (tinker.TinkerError, ValueError) as error:
        fail(f"{address} does not list its models ({describe(error)}); check the address and the key, or give model=")
    names = [model.model_name for model in models if model.model_name]
    if not names:
        fail(f"{address} lists no model; give model=")
    return Target(server.base_url, key, names[0], config.tokenizer, config.tolerance)


def main(config: Config) -> NoReturn:
    checks, server = chosen(config.checks), target(config)
    print(f"{server.base_url}, model {server.model}, SDK {tinker.__version__}: {len(checks)} checks", flush=True)
    rows: list[Row] = []
    for row in harness.run(checks, server, config.seconds):
        rows.append(row)
        print(harness.line(row), flush=True)
        if config.json is not None:  # after each check, so that an interrupted run keeps its rows
            Path(config.json).expanduser().write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(harness.summary(rows), flush=True)
    sys.stderr.flush()
    # Not sys.exit: a check that still waits has threads that Python would wait for.
    os._exit(any(row.outcome == "failed" for row in rows))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the SDK warns of deprecated calls, which are checked too
    run(main, parse(Config))
