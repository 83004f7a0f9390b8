"""The plan of a sweep: the points of a grid, each checked against the recipe's config before anything starts.

A recipe is a module with `CLIConfig` (a chz class with `log_path` and `behavior_if_log_dir_exists`) and `main(config)`.
`run.py` runs the points, `collect.py` reads their metrics.
"""

import difflib
import hashlib
import importlib
import itertools
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.files import to_jsonable

Value: TypeAlias = str | int | float | bool | None
Point: TypeAlias = Mapping[str, Value]

RUN_KEYS = ("log_path", "behavior_if_log_dir_exists")
"""Keys of a recipe that the sweep sets itself."""
SEED_KEY = "seed"
"""Runs that differ in this key alone are repetitions of each other."""
MAX_NAME_LENGTH = 140


@dataclass(frozen=True)
class Recipe:
    """A recipe's module, its config class and its entry function."""

    module: str
    config_cls: type[Any]
    main: Callable[[Any], Any]


@dataclass(frozen=True)
class PlannedRun:
    """One point of a sweep."""

    name: str
    """the run's folder below the sweep's, made from the point's values"""
    point: dict[str, Value]
    """the values swept over, as the config holds them"""
    arguments: tuple[str, ...]
    """`key=value` for the recipe's command line, without the keys that the sweep sets"""
    config: dict[str, Any]
    """the whole config as plain JSON types"""


def load_recipe(module_name: str) -> Recipe:
    """The recipe of a module such as `recipes.rl_basic`.

    Raises:
        ConfigurationError: no such module, or it is not a recipe.
    """
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the recipe exists, but one of its imports does not
        raise ConfigurationError(f"recipe={module_name!r}: no such module{_similar_modules(module_name)}") from error
    config_cls, main = getattr(module, "CLIConfig", None), getattr(module, "main", None)
    if not (isinstance(config_cls, type) and chz.is_chz(config_cls) and callable(main)):
        raise ConfigurationError(f"recipe={module_name!r}: is not a recipe, which has a chz class CLIConfig and a main")
    if missing := [key for key in RUN_KEYS if key not in chz.chz_fields(config_cls)]:
        raise ConfigurationError(
            f"recipe={module_name!r}: cannot be swept, its config has no {' and no '.join(missing)}"
        )
    return Recipe(module_name, config_cls, main)


def grid(values: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Every combination of the values, the last key changing fastest.

    Raises:
        ConfigurationError: a key has no value.
    """
    if empty := [key for key, choices in values.items() if isinstance(choices, str) or not choices]:
        raise ConfigurationError(f"grid.{empty[0]}: needs a list of at least one value, got {values[empty[0]]!r}")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def split_values(text: str) -> list[str]:
    """The values of a command-line list: separated by `|` if there is one, else by commas."""
    return [part.strip() for part in text.split("|" if "|" in text else ",") if part.strip()]


def gather_keys(argv: Sequence[str], *groups: str) -> list[str]:
    """Merge all `group.key=text` arguments of a group into one, `group={'key': 'text'}`, so that keys may contain dots."""
    gathered: dict[str, dict[str, str]] = {group: {} for group in groups}
    rest: list[str] = []
    for argument in argv:
        key, equals, text = argument.lstrip("-").partition("=")
        group, dot, name = key.partition(".")
        if equals and dot and group in gathered:
            gathered[group][name] = text
        else:
            rest.append(argument)
    return rest + [f"{group}={members!r}" for group, members in gathered.items() if members]


def plan(recipe: Recipe, points: Sequence[Point], fixed: Point | None = None) -> list[PlannedRun]:
    """The runs of a sweep; every config is built once to check that the recipe accepts it.

    Args:
        recipe: the recipe to run.
        points: the values that differ between the runs; texts are parsed as on a command line.
        fixed: the values shared by all runs.

    Raises:
        ConfigurationError: no point, an unknown key (with the nearest known one), a value that the recipe rejects, a
            key both swept and fixed, or two equal points.
    """
    fixed = dict(fixed or {})
    if not points:
        raise ConfigurationError("the sweep has no points; give grid.<key>=value,value or seeds=0,1")
    for group, keys in (("grid", {key for point in points for key in point}), ("set", set(fixed))):
        for key in sorted(keys):
            _check_key(recipe, group, key)
    runs: dict[str, PlannedRun] = {}
    for point in points:
        if twice := sorted(point.keys() & fixed.keys()):
            raise ConfigurationError(f"{twice[0]} is both swept (grid.{twice[0]}) and fixed (set.{twice[0]}); drop one")
        run = _plan_run(recipe, point, fixed)
        if run.name in runs:
            raise ConfigurationError(f"the sweep has the point {run.name} twice; drop the repeated value")
        runs[run.name] = run
    return list(runs.values())


def _plan_run(recipe: Recipe, point: Point, fixed: Point) -> PlannedRun:
    arguments = tuple(f"{key}={_argument_text(key, value)}" for key, value in {**fixed, **point}.items())
    try:
        config = cli_utils.parse(recipe.config_cls, arguments)
    except Exception as error:
        # chz prefixes field names, and mentions --help, which is the recipe's and not the sweep's.
        message = cli_utils.what_is_unknown(str(error)) or re.sub(r"\bX_(?=\w)", "", str(error))
        message = message.replace("\nAppend --help to your command to see valid arguments", "")
        raise ConfigurationError(f"{recipe.module} refuses {' '.join(arguments)}: {message}") from error
    values = {key: _value_in(config, key, value) for key, value in point.items()}
    dumped = {key: value for key, value in to_jsonable(config).items() if key not in RUN_KEYS}
    return PlannedRun(run_name(values), values, arguments, dumped)


def run_name(values: Point) -> str:
    """A folder name made from the values: equal values give equal names, different ones different names."""
    plain = ",".join(f"{key}={_argument_text(key, value)}" for key, value in values.items())
    clean = re.sub(r"[^A-Za-z0-9_.+=,\-]+", "-", plain)
    if clean == plain and len(clean) <= MAX_NAME_LENGTH:
        return clean
    digest = hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()[:8]
    return f"{clean[:MAX_NAME_LENGTH]}-{digest}"


def _check_key(recipe: Recipe, group: str, key: str) -> None:
    fields = chz.chz_fields(recipe.config_cls)
    if key in RUN_KEYS:
        raise ConfigurationError(f"{group}.{key}: is set by the sweep for each run; drop it")
    if key.partition(".")[0] not in fields:
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"python -m {recipe.module} --help lists them"
        raise ConfigurationError(f"{group}.{key}: {recipe.module} has no such key; {hint}")


def _argument_text(key: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise ConfigurationError(f"{key}: a sweep takes texts, numbers, True, False and None, got {value!r}")


def _value_in(config: Any, key: str, given: Value) -> Value:
    """The value as stored in the config, so that 1e-4 and 0.0001 are one point; values that objects are built from are
    unchanged.
    """
    value = config
    for part in key.split("."):
        value = getattr(value, part, given)
    plain = to_jsonable(value)
    return plain if plain is None or isinstance(plain, str | bool | int | float) else given


def _similar_modules(name: str) -> str:
    parent, _, last = name.rpartition(".")
    try:
        paths = importlib.import_module(parent).__path__
    except (ImportError, AttributeError, ValueError):
        return "; give a module such as recipes.rl_basic"
    near = difflib.get_close_matches(last, [module.name for module in pkgutil.iter_modules(paths)], n=1)
    return f"; did you mean {parent}.{near[0]}?" if near else f" in {parent}"
