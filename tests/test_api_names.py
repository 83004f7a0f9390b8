"""The names that scripts of the ecosystem import, with their parameters: a call that works there works here.

A name has to be where it is looked for and to take every parameter by its name. What differs on purpose is listed with its
reason, and must differ: an entry that is no longer needed fails.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import chz
import pytest

NAMES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("api_names.json").read_text())
"""Module below tinker_cookbook -> name -> its parameters, as far as scripts give them."""

_DELTA = "a delta says only what came; role and order of the blocks follow from the deltas before it"

DIFFERENCES: dict[str, str] = {
    "stores.IncrementalReader(max_records)": "a run's rows are kept whole, as read_metrics gives them",
    "preference.train_dpo.Config(num_replicas)": "nothing reads it there, and it would do nothing here",
    "preference.ComparisonDatasetBuilder(swap)": "nothing reads it there; ChatDatasetBuilderFromComparisons(swap) does it",
    "preference.preference_datasets.ComparisonDatasetBuilder(swap)": "as in the package preference: nothing reads it there",
    "renderers.StreamingMessageHeader(name)": _DELTA,
    "renderers.StreamingTextDelta(content_index)": _DELTA,
    "renderers.StreamingThinkingDelta(content_index)": _DELTA,
    "renderers.deepseek_v3.DeepSeekV3ThinkingRenderer(system_role_as_user)": "system text is written as the template does",
}
"""module.Name or module.Name(parameter) -> why it is not here."""


def parameters(found: Any) -> set[str]:
    """The names by which arguments can be given."""
    if isinstance(found, type) and chz.is_chz(found):
        return set(chz.chz_fields(found))
    return {name for name, p in inspect.signature(found).parameters.items() if p.kind is not p.VAR_KEYWORD}


def missing(module: str, name: str) -> set[str]:
    """What of an entry is not to be had, as the list of differences writes it."""
    try:
        found = getattr(importlib.import_module(f"tinker_cookbook.{module}"), name)
    except (ImportError, AttributeError):
        return {f"{module}.{name}"}
    wanted = NAMES[module][name].split()
    return {f"{module}.{name}({key})" for key in wanted if key not in parameters(found)} if wanted else set()


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_name_is_here_with_its_parameters(module: str, name: str) -> None:
    of_entry = f"{module}.{name}"
    assert missing(module, name) == {key for key in DIFFERENCES if key.partition("(")[0] == of_entry}


def test_every_difference_is_of_an_entry_and_has_a_reason() -> None:
    entries = {f"{module}.{name}" for module, names in NAMES.items() for name in names}
    assert {key.partition("(")[0] for key in DIFFERENCES} <= entries
    assert all(len(reason) > 20 for reason in DIFFERENCES.values())
