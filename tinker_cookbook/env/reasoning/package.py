"""Access to the package reasoning-gym: its generators, their configs and their curricula.

It is imported when an environment is made, never before, and every name is checked against it then.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, MissingPackageError
from tinker_cookbook.utils.extras import install_command

BLOCK = 1000
"""Questions per dataset object: some generators make all of them at once, and some divide them into kinds."""
_RUNS_ANSWERS = re.compile(r"\beval\(answer|\bparse_expr\(answer")
_UNSTABLE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Generators of 0.1.25 that draw from sets of texts, whose order Python changes from process to process."""
_OURS = ("seed", "size")
"""Fields of every config that the environment fills."""


@cache
def _factory() -> Any:
    """The package's registry. Raises MissingPackageError."""
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise MissingPackageError(
            f"env=reasoning_gym needs the package reasoning-gym, which cannot be imported ({error}); "
            f"{install_command('reasoning')}"
        ) from error


def generators() -> dict[str, str]:
    """Name -> category, sorted by category and name. Raises MissingPackageError."""
    made = {name: cls.__module__.split(".")[1] for name, (cls, _) in _factory().DATASETS.items() if name != "composite"}
    return dict(sorted(made.items(), key=lambda item: (item[1], item[0])))


def has_levels(name: str) -> bool:
    """Whether the package has a curriculum for a generator."""
    return name in _factory().CURRICULA


def runs_answers(name: str) -> bool:
    """Whether the generator's score_answer evaluates the answer as Python."""
    return bool(_RUNS_ANSWERS.search(inspect.getsource(_factory().DATASETS[name][0])))


def config_keys(name: str) -> list[str]:
    """The fields of a generator's config that a user may set."""
    return [field.name for field in dataclasses.fields(_factory().DATASETS[name][1]) if field.name not in _OURS]


def check_names(names: Iterable[str], what: str) -> None:
    """Raises ConfigurationError for an unknown generator, with the closest names."""
    known = generators()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}?" if near else "docs/reasoning_gym.md lists them"
            raise ConfigurationError(f"{what}: reasoning-gym has no generator {name!r}; {meant}")


def check_stable(names: Iterable[str]) -> None:
    """Raises ConfigurationError for a generator whose questions would differ in a resumed run."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random" and (
        bad := [name for name in names if name in _UNSTABLE]
    ):
        raise ConfigurationError(
            f"env=reasoning_gym: {bad[0]} asks different questions in every process; set PYTHONHASHSEED=0, or leave it out"
        )


def check_safe(names: Iterable[str]) -> None:
    """Raises ConfigurationError for a generator that runs answers."""
    if bad := [name for name in names if runs_answers(name)]:
        raise ConfigurationError(
            f"env=reasoning_gym: {bad[0]} evaluates the policy's answers as Python in this process; leave it out, or give "
            "env.run_answers=True in a container without anything of value"
        )


def read_overrides(name: str, given: Mapping[str, Any], with_levels: bool) -> str:
    """The JSON of a generator's overrides.

    Raises ConfigurationError: an unknown key, a value that the config refuses, one that is not JSON, or a key that the
    curriculum sets.
    """
    known = config_keys(name)
    moved = _level_fields(name) if with_levels else ()
    for key in given:
        if key not in known:
            raise ConfigurationError(f"env.config.{name}.{key}: is unknown; {name} takes {', '.join(known)}")
        if key in moved:
            raise ConfigurationError(
                f"env.config.{name}.{key}: is set by the curriculum; leave it out, or leave out env.curriculum"
            )
    try:
        text = json.dumps(dict(given), sort_keys=True)
    except TypeError as error:
        raise ConfigurationError(f"env.config.{name}: {error}; give numbers, texts and lists") from None
    try:
        _checked(_factory().DATASETS[name][1](**json.loads(text), seed=0, size=BLOCK))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigurationError(f"env.config.{name}={dict(given)}: {error or 'is refused by the generator'}") from None
    return text


def _checked(config: Any) -> Any:
    if hasattr(config, "validate"):
        config.validate()
    return config


def _level_fields(name: str) -> set[str]:
    names = ("field_name", "lower_field_name", "upper_field_name")
    attributes = _factory().create_curriculum(name).attributes.values()
    return {getattr(attribute, one) for attribute in attributes for one in names if hasattr(attribute, one)}


def _config(name: str, overrides: str, level: int | None, seed: int) -> Any:
    values = {**json.loads(overrides), "seed": seed, "size": BLOCK}
    if level is None:
        return _checked(_factory().DATASETS[name][1](**values))
    curriculum = _factory().create_curriculum(name)
    curriculum.set_global_level(level)
    return _checked(curriculum.generate_configuration(values))


@lru_cache(maxsize=256)
def count_levels(name: str, overrides: str) -> int:
    """Levels of a generator's curriculum, up to the first whose config the generator refuses.

    Raises ConfigurationError: there are fewer than two.
    """
    longest, refusal = (
        max(len(attribute.levels) for attribute in _factory().create_curriculum(name).attributes.values()),
        "",
    )
    for level in range(longest):
        try:
            _config(name, overrides, level, 0)
        except (AssertionError, TypeError, ValueError) as error:
            longest, refusal = level, f" ({error})"
            break
    if longest < 2:
        raise ConfigurationError(
            f"env.curriculum=True: {name} has no levels to move between{refusal}; leave one of the two out"
        )
    return longest


@lru_cache(maxsize=32)
def make_dataset(name: str, overrides: str, level: int | None, seed: int) -> Any:
    """The package's dataset of BLOCK questions.

    Args:
        overrides: JSON of config fields.
        level: of the curriculum, from 0; None: the config's defaults.
    """
    return _factory().DATASETS[name][0](_config(name, overrides, level, seed))
