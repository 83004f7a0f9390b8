"""The study of the model-aware environments: what its table says of given runs, and that it runs the experiment files."""

import asyncio
from pathlib import Path

import pytest

from benchmarks import model_aware, shadow
from benchmarks.errors import BenchmarkError
from benchmarks.model_aware import BEGIN, CONTROLS, END, ModelAwareConfig, fill_page, table_row
from recipes import run_experiment
from recipes.common import for_model
from tests.pages import ROOT
from tinker_cookbook import cli_utils
from tinker_local_backend import ServiceClient


def rows(start: float, rise: float, name: str) -> list[dict[str, float]]:
    """Ten steps, whose reward rises by `rise` between the middles of their halves, with controls that stay."""
    controls = {f"env/all/{key}": 0.25 for key in CONTROLS[name]}
    return [
        {"step": i, "env/all/reward/total": start + rise * i / 5, **controls}
        | ({"test/env/all/reward/total": start + i} if i in (0, 9) else {})
        for i in range(10)
    ]


def test_a_row_says_what_every_seed_did() -> None:
    found = table_row("gradient_prophet", [rows(0.0, 1.0, "gradient_prophet"), rows(2.0, -0.5, "gradient_prophet")])
    assert found[0] == "`gradient_prophet`"
    assert found[1] == "1.10 ± 0.99 to 1.35 ± 0.07 (+1.00, -0.50)"
    assert found[2] == "1.00 ± 1.41 to 10.00 ± 1.41 (+9.00, +9.00)"
    assert found[3] == "`format` 0.25 to 0.25; `over_constant` 0.25 to 0.25; `true` 0.25 to 0.25"


def test_what_a_run_does_not_report_is_named() -> None:
    with pytest.raises(BenchmarkError, match="env/all/predicted is reported by 0 of 1 runs"):
        table_row("gradient_intuition", [rows(0.0, 1.0, "gradient_prophet")])


def test_the_page_has_the_place_of_the_table() -> None:
    page = (ROOT / "docs" / "model_aware.md").read_text()
    filled = fill_page(page, "| new |")
    assert f"{BEGIN}\n\n| new |\n\n{END}" in filled and fill_page(filled, "| new |") == filled
    assert filled.partition(BEGIN)[0] == page.partition(BEGIN)[0] and filled.partition(END)[2] == page.partition(END)[2]
    with pytest.raises(BenchmarkError, match="must have the lines"):
        fill_page("nothing", "")


def test_every_file_is_an_experiment() -> None:
    assert [name for name in CONTROLS if not (ROOT / "configs" / f"{name}.toml").exists()] == []


def test_the_page_says_how_many_are_held_out() -> None:
    counts = []
    for name in CONTROLS:
        cli = for_model(cli_utils.parse(run_experiment.CLIConfig, [str(ROOT / "configs" / f"{name}.toml")]))
        _, test = asyncio.run(run_experiment.make_dataset_builder(cli)())
        assert test is not None
        counts.append(sum(len(test.get_batch(i)) for i in range(len(test))))
    said = "The held-out sets are {} words, {} sums, {} choices, {} probes and {} sums.".format(*counts)
    assert said in (ROOT / "docs" / "model_aware.md").read_text()


@pytest.mark.slow
def test_the_files_run_and_their_controls_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"max_steps": "2", "eval_every": "2", "num_rollouts": "16", "warm_up_steps": "24"}
    config = ModelAwareConfig(only=("train_ghost",), seeds=(0, 1), fixed=small, folder=str(tmp_path), page="")
    model_aware.main(config)
    printed = capsys.readouterr().out
    assert printed.count("finished") == 2 and "| `train_ghost` |" in printed and "`specific`" in printed
    with pytest.raises(BenchmarkError, match="only=nothing"):
        model_aware.main(ModelAwareConfig(only=("nothing",)))


@pytest.mark.slow
def test_the_cost_of_a_shadow_is_measured(tmp_path: Path) -> None:
    with ServiceClient(home=tmp_path) as service:
        seconds = shadow.measure(shadow.ShadowConfig(groups=1, group=2, prompt=20, answer=5), service)
    assert set(seconds) == {"sampled", "trained", "shadow"} and min(seconds.values()) > 0
