"""What must hold of a sweep's plan: nothing wrong gets as far as a run, and equal values have equal names."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweeps import toy
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweeps import points
from tinker_cookbook.sweeps.points import Recipe, grid, load_recipe, plan, run_name, split_values

TOY = Recipe("tests.sweeps.toy", toy.CLIConfig, toy.main)

values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=200))


class TestGrid:
    def test_every_combination_the_last_key_fastest(self) -> None:
        assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
            {"a": 1, "b": "x"},
            {"a": 1, "b": "y"},
            {"a": 2, "b": "x"},
            {"a": 2, "b": "y"},
        ]

    @pytest.mark.parametrize("choices", [[], "1,2"])
    def test_a_key_needs_a_list_of_values(self, choices: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"grid\.a: needs a list"):
            grid({"a": choices})

    def test_values_with_commas_are_separated_by_bars(self) -> None:
        assert split_values("1e-5, 1e-4") == ["1e-5", "1e-4"]
        assert split_values("a:0.5,b:0.3|c") == ["a:0.5,b:0.3", "c"]

    def test_grouped_keys_may_have_dots(self) -> None:
        argv = ["recipe=r", "grid.inner.beta=1,2", "--grid.a=3", "set.x='y'", "seeds=0"]
        assert points.gather_keys(argv, "grid", "set") == [
            "recipe=r",
            "seeds=0",
            "grid={'inner.beta': '1,2', 'a': '3'}",
            "set={'x': \"'y'\"}",
        ]


class TestPlan:
    def test_names_and_values_are_those_of_the_config(self) -> None:
        texts = plan(TOY, [{"learning_rate": "1e-4", "seed": "1"}], {"inner.beta": "2"})
        numbers = plan(TOY, [{"learning_rate": 0.0001, "seed": 1}], {"inner.beta": 2.0})
        assert texts[0].name == numbers[0].name == "learning_rate=0.0001,seed=1"
        assert texts[0].point == {"learning_rate": 0.0001, "seed": 1}
        assert texts[0].config == numbers[0].config and texts[0].config["inner"]["beta"] == 2
        assert "log_path" not in texts[0].config

    @pytest.mark.parametrize(
        ("point", "fixed", "message"),
        [
            ({"learning_rat": "1"}, {}, r"^grid\.learning_rat: .*did you mean learning_rate\?"),
            ({"seed": "1"}, {"max_stps": "1"}, r"^set\.max_stps: .*did you mean max_steps\?"),
            ({"zzz": "1"}, {}, r"^grid\.zzz: .*--help lists them"),
            ({"inner.gamma": "1"}, {}, r"inner\.gamma"),
            ({"learning_rate": "fast"}, {}, r"learning_rate=fast: .*'fast'"),
            ({"learning_rate": "-1"}, {}, r"Expected learning_rate to be greater than 0"),
            ({"log_path": "x"}, {}, r"^grid\.log_path: is set by the sweep"),
            ({"seed": "1"}, {"seed": "2"}, r"both swept \(grid\.seed\) and fixed"),
            ({"seed": [1]}, {}, r"^seed: a sweep takes texts"),
        ],
    )
    def test_what_the_recipe_refuses_is_refused(self, point: Any, fixed: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            plan(TOY, [{"seed": "0"}, point], fixed)

    def test_one_point_twice_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"learning_rate=0\.0001 twice"):
            plan(TOY, grid({"learning_rate": ["1e-4", "0.0001"]}))

    def test_no_point_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="no points"):
            plan(TOY, [])

    @given(
        st.dictionaries(st.text(max_size=20), values, max_size=4),
        st.dictionaries(st.text(max_size=20), values, max_size=4),
    )
    def test_names_are_safe_stable_and_unequal_for_unequal_values(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        name = run_name(a)
        assert name == run_name(dict(a)) and "/" not in name and len(name) < 200
        if json.dumps(a) != json.dumps(b) and any(len(run_name(x)) > 9 for x in (a, b)):
            assert name != run_name(b) or "".join(f"{k}={v}" for k, v in a.items()) == "".join(
                f"{k}={v}" for k, v in b.items()
            )


class TestLoadRecipe:
    def test_a_recipe_is_found(self) -> None:
        assert load_recipe("tests.sweeps.toy") == TOY

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("recipes.rl_basik", r"no such module; did you mean recipes\.rl_basic\?"),
            ("nowhere.at_all", "no such module"),
            ("tinker_cookbook.sweeps.points", "is not a recipe"),
        ],
    )
    def test_what_is_none_is_named(self, name: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            load_recipe(name)
