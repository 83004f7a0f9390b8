"""The peers of a benchmark, the ones that can run here, and a row for each that cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.config import ComparisonConfig
from benchmarks.errors import BenchmarkError
from benchmarks.harness import Contender, Measurement, absent, describe
from benchmarks.peers.process import isolated
from benchmarks.peers.setup import Setup


@dataclass(frozen=True)
class Peer:
    """A tool. `build` makes one contender per row of the table; `missing` returns why it cannot run here, or None."""

    build: Callable[[Setup], list[Contender]]
    missing: Callable[[Setup], str | None]


def needs(*packages: str) -> Callable[[Setup], str | None]:
    """A `missing` function for packages of the library's environment."""

    return lambda setup: not_installed(*packages)


def not_installed(*packages: str) -> str | None:
    """A message with the missing packages and how to install them; None if none is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"not installed (pip install {' '.join(missing)})" if missing else None


def require(*packages: str) -> None:
    """Raise BenchmarkError for missing packages, in a benchmark that needs its peer."""
    if reason := not_installed(*packages):
        raise BenchmarkError(f"{', '.join(packages)}: {reason}")


def select(config: ComparisonConfig, peers: Mapping[str, Peer]) -> dict[str, Peer]:
    """The peers selected by `config.peers`. Raises BenchmarkError for a name that this benchmark does not have."""
    if config.peers is None:
        return dict(peers)
    unknown = [name for name in config.peers if name not in peers]
    if unknown:
        raise BenchmarkError(f"peers={','.join(unknown)}: unknown here; this benchmark has {', '.join(peers)}")
    return {name: peers[name] for name in config.peers}


def build(setup: Setup, peers: Mapping[str, Peer]) -> tuple[list[Contender], list[Measurement]]:
    """Contenders of the peers that can run, and a row with the reason for each that cannot."""
    contenders: list[Contender] = []
    missing: list[Measurement] = []
    for name, peer in peers.items():
        reason = peer.missing(setup)
        if reason is not None:
            missing.append(absent(name, reason))
            continue
        try:
            contenders += isolated(peer.build, setup)
        except Exception as error:
            missing.append(absent(name, f"failed to start: {describe(error)}"))
    return contenders, missing
