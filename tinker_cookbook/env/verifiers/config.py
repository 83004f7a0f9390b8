"""The config of a verifiers environment; the policy in this process plays every role that names no other model."""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import load_file
from tinker_cookbook.utils.extras import install_command

IN_PROCESS = "in-process"
_V1, _LEGACY = "0.4.", "0.3.1"

Form: TypeAlias = Literal["v1", "legacy"]
"""The interface of the installed package: tasksets, envs and harnesses (0.4), or `load_environment` (0.3.1, the last with it)."""


def installed_form() -> Form:
    """The form of the installed verifiers. Raises ConfigurationError: it is not installed, or has another version."""
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigurationError(
            f"verifiers is needed and cannot be imported ({error}); {install_command('verifiers')}"
        ) from error
    if verifiers.__version__.startswith(_V1):
        return "v1"
    if verifiers.__version__ == _LEGACY:
        return "legacy"
    raise ConfigurationError(
        f"verifiers {verifiers.__version__} is installed; {_V1}* is needed for tasksets, or {_LEGACY} for load_environment"
    )


def plugin_id(kind: str, plugin: str) -> str:
    """The id of a plugin in verifiers: a known name, a module, or a file, which is imported.

    Args:
        kind: tasksets, envs or harnesses.

    Raises:
        ConfigurationError: a file or module that cannot be imported.
    """
    try:
        if plugin.endswith(".py"):
            module = load_file(Path(plugin))
            _find_in_processes(Path(plugin).expanduser().resolve().parent)
            return module.__name__
        if "." not in plugin or "/" in plugin:
            return plugin
        module = importlib.import_module(plugin)
    except (ImportError, OSError) as error:
        raise ConfigurationError(f"{plugin}: cannot be imported ({type(error).__name__}: {error})") from error
    name = plugin.replace(".", "_").lower()
    sys.modules[f"verifiers.v1.{kind}.{name}"] = module  # verifiers imports names without dots
    return name


def _find_in_processes(folder: Path) -> None:
    """Let the processes that verifiers starts import from a folder: a tool server is run as a module."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])


def environment_config(
    taskset: str,
    taskset_args: Mapping[str, Any] | None = None,
    env: str = "",
    env_args: Mapping[str, Any] | None = None,
    harness: str | None = IN_PROCESS,
) -> Any:
    """The `EnvConfig` of a taskset.

    Args:
        taskset, env: plugins of verifiers (`plugin_id`). Without env: the taskset's own, or else one agent per
            task.
        taskset_args, env_args: fields of their configs; also of a role, as in {"solver": {"max_turns": 3}}.
        harness: for each role without one, unless the taskset has its own; None keeps verifiers' default.

    Raises:
        ConfigurationError: a plugin that is not found, or a field that is unknown or wrong.
    """
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    module = importlib.import_module("tinker_cookbook.env.verifiers.in_process")
    sys.modules[f"verifiers.v1.harnesses.{IN_PROCESS.replace('-', '_')}"] = module
    values = dict(env_args or {})
    try:
        taskset, env = plugin_id("tasksets", taskset), plugin_id("envs", env) if env else ""
        loaders.taskset_class(taskset)
        own_harness = loaders.default_harness_id(taskset) == taskset
        config_cls = loaders.env_config_type(taskset, env)
        for name, role in agent_config_fields(config_cls.model_construct()).items():
            given = dict(values.get(name) or {})
            if "runtime" not in role.model_fields_set:
                given.setdefault("runtime", {"type": "subprocess"})
            if role.harness is None and harness is not None and not own_harness:
                given.setdefault("harness", {"id": harness})
            values[name] = given
        return config_cls.model_validate({**values, "id": env, "taskset": {**(taskset_args or {}), "id": taskset}})
    except (ValidationError, ImportError, AttributeError, TypeError, ValueError) as error:
        older = hasattr(sys.modules.get(taskset), "load_environment") and isinstance(error, AttributeError | TypeError)
        hint = f"; it has load_environment, for which verifiers=={_LEGACY} is needed" if older else ""
        raise ConfigurationError(f"taskset={taskset}: {error}{hint}") from error
