"""`--help` of every recipe: quick to answer, own keys first, and with the defaults that the recipe really has."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from typing import get_args

import chz
import pytest
from chz.util import MISSING_TYPE

from recipes import __main__ as listing
from recipes.common import CommonConfig
from tests.child import python_path
from tests.waiting import HANG_SECONDS
from tinker_cookbook import cli_help, cli_utils
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.distillation.sdft import SDFTOptions
from tinker_cookbook.distillation.train_off_policy import OffPolicyOptions
from tinker_cookbook.distillation.train_on_policy import OnPolicyOptions
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.train_dpo import DPOOptions
from tinker_cookbook.rl.config import RLOptions
from tinker_cookbook.supervised.train import SupervisedOptions
from tinker_cookbook.utils.fields import default_of

HEAVY = ("tinker", "torch", "transformers", "pandas", "datasets", "tinker_local_backend.engine")
RECIPES = sorted(listing.recipes())
MAIN_ONES = ("rl_basic", "debate_rs_grpo", "sl_basic", "preference.train")
OPTIONS = {
    "rl_basic": RLOptions, "debate_rs_grpo": RLOptions, "single_turn": RLOptions, "math_rl": RLOptions, "code_rl": RLOptions,
    "tool_use": RLOptions, "rl": RLOptions, "guess_number": RLOptions, "twenty_questions": RLOptions, "shorter": RLOptions,
    "sl_basic": SupervisedOptions, "chat_sl": SupervisedOptions, "prompt_distillation.train": SupervisedOptions,
    "preference.train": DPOOptions, "preference.rlhf_pipeline": RLOptions,
    "distillation.on_policy": OnPolicyOptions, "distillation.off_policy": OffPolicyOptions,
    "distillation.sdft": SDFTOptions,
}  # fmt: skip


def config_class(name: str) -> type:
    module = importlib.import_module(f"recipes.{name}")
    return getattr(module, "CLIConfig", None) or module.DemoConfig


def shown_keys(name: str) -> dict[str, str]:
    """Key -> default as text, in the order of the help."""
    lines = cli_help.help_text(config_class(name), everything=True).splitlines()
    rows = [(found[1], found[2]) for line in lines if (found := re.match(r"  ([\w.]+)=(\(.*?\)|\[.*?\]|\S*)", line))]
    assert len({key for key, _ in rows}) == len(rows)
    return dict(rows)


def test_no_recipe_waits_for_the_large_packages() -> None:
    """One child for all: were a single recipe to import one, it would be there at the end."""
    code = (
        "import importlib, json, sys\n"
        "from tinker_cookbook import cli_help\n"
        f"for name in {RECIPES!r}:\n"
        "    module = importlib.import_module('recipes.' + name)\n"
        "    config = getattr(module, 'CLIConfig', None) or module.DemoConfig\n"
        "    assert len(cli_help.help_text(config)) > 100\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))\n"
    )
    env = {**os.environ, "PYTHONPATH": python_path()}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=HANG_SECONDS)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_is_shown_with_its_default(name: str) -> None:
    cls, shown = config_class(name), shown_keys(name)
    fields = chz.chz_fields(cls)
    assert {key.partition(".")[0] for key in shown} == set(fields)
    required = {key for key, field in fields.items() if isinstance(default_of(field), MISSING_TYPE)}
    config = cls(**{key: next(iter(get_args(fields[key].x_type)), "given") for key in required})
    for key, text in shown.items():
        head, _, rest = key.partition(".")
        value = getattr(config, head)
        told = text == "" and "default:" in fields[head]._doc
        if head in required or told or (value is None and (rest or text == "")):
            continue  # nested and not in use, or the documentation tells the default
        for part in rest.split(".") if rest else ():
            value = getattr(value, part) if value is not None else None
        if text == "" and value is None:
            continue
        if head == "model_name" and value is not None:
            text, value = (
                shipped_model(text),
                shipped_model(value),
            )  # some configs hold the folder that a name stands for
        assert text in (str(value).partition(" ")[0], repr(value).partition(" ")[0], str(value), repr(value)), key


@pytest.mark.parametrize("name", MAIN_ONES)
def test_own_keys_come_first_then_shared_ones_then_what_is_nested(name: str) -> None:
    keys = list(shown_keys(name))
    inherited = {key for base in config_class(name).__mro__[1:] if chz.is_chz(base) for key in chz.chz_fields(base)}
    inherited |= set(CommonConfig.SHARED_KEYS)
    nested = {key.partition(".")[0] for key in keys if "." in key}
    own = [key for key in inspect.get_annotations(config_class(name)) if key not in inherited | nested]
    shared = [key for key in CommonConfig.SHARED_KEYS if key in keys]
    assert keys[: len(own)] == own
    assert [key for key in keys if key in shared] == shared
    start = keys.index("model_name")
    assert keys[start : start + len(shared)] == shared
    nested = [key for key in keys if "." in key]
    assert keys[len(keys) - len(nested) :] == nested
    assert nested


@pytest.mark.parametrize(("name", "options"), OPTIONS.items())
def test_no_setting_of_the_loop_is_out_of_reach(name: str, options: type) -> None:
    assert set(chz.chz_fields(options)) <= set(chz.chz_fields(config_class(name)))


@pytest.mark.parametrize(("key", "place"), cli_help.RENAMED.items())
def test_a_key_of_old_names_the_new_one(key: str, place: str) -> None:
    recipes = [name for name in RECIPES if cli_help.renamed(config_class(name), key) == place]
    assert recipes
    config = config_class(recipes[0])
    assert place.partition(",")[0].partition(".")[0] in chz.chz_fields(config)
    with pytest.raises(ConfigurationError, match=rf"^{key}=1: this key is now {re.escape(place)}$"):
        cli_utils.parse(config, [f"{key}=1"])


@pytest.mark.parametrize("name", MAIN_ONES)
def test_the_short_help_has_the_own_and_the_shared_keys_alone(name: str) -> None:
    cls, text = config_class(name), cli_help.help_text(config_class(name))
    explained = re.findall(r"^  ([\w.]+(?:=|\.\*))", text, re.MULTILINE)
    assert 20 <= len(explained) <= 45
    assert {f"{key}=" for key in CommonConfig.SHARED_KEYS if key in chz.chz_fields(cls)} <= {*explained}
    own = {key for key in inspect.get_annotations(cls) if cli_help.nested_class(chz.chz_fields(cls)[key])}
    assert {key.partition(".")[0] for key in explained if "." in key and key.endswith("=")} == own
    named = set(re.findall(r"[\w]+", text.partition("--help=all explains")[2])) | {
        key.rstrip("=.*") for key in explained
    }
    named |= own
    assert set(chz.chz_fields(cls)) <= named


def test_an_alias_is_another_name_of_a_key_of_every_recipe_that_has_it() -> None:
    for name in RECIPES:
        fields = chz.chz_fields(config_class(name))
        for alias, key in cli_help.ALIASES.items():
            if key in fields and alias not in fields and fields[key].final_type in (int, str, str | None):
                given = [f"{other}=1" for other, field in fields.items() if isinstance(default_of(field), MISSING_TYPE)]
                if f"{key}=1" not in given:
                    assert str(getattr(cli_utils.parse(config_class(name), [*given, f"{alias}=2"]), key)) == "2"
    assert "num_batches is max_steps" in cli_help.help_text(config_class("rl_basic"), everything=True)


def test_the_list_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main([])
    shown = capsys.readouterr().out
    for name, line in listing.recipes().items():
        assert re.search(rf"^  {re.escape(name)} +{re.escape(line)}$", shown, re.MULTILINE)
    assert {"rl_basic", "preference.train", "sweep"} <= listing.recipes().keys()
    with pytest.raises(SystemExit) as raised:
        listing.main(["rl_basc", "seed=1"])
    assert raised.value.code == 2
    assert "there is no recipe 'rl_basc'; did you mean rl_basic?" in capsys.readouterr().err
