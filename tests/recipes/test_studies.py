"""The studies: their runs train what they say, go on after an interruption, and their words come from their numbers."""

import math
from pathlib import Path
from typing import Any

import pandas
import pytest
import tinker
import torch

from recipes import anchor_study, full_fine_tuning, rank_study, staleness_study
from recipes.staleness_study import LOSSES, K
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.sweeps import run as sweep_run
from tinker_cookbook.sweeps.points import gather_keys
from tinker_cookbook.utils.files import read_json_object

SMALL = ("set.num_test=4", "set.groups_per_batch=2", "set.group_size=4", "set.lora_rank=4")


def study(recipe: Any, folder: Path, *keys: str) -> None:
    argv = [*keys, f"sweep_dir={folder}"]
    run_recipe(recipe.CLIConfig, recipe.main, argv=argv, prepare=lambda arguments: gather_keys(arguments, "set"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


class TestStaleness:
    def test_two_runs_of_exact_staleness_of_which_one_is_interrupted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys = ("losses=tis", "staleness=0,2", "substeps=2", "steps=4", "seeds=1", *SMALL)
        folder, begun = tmp_path / "study", []
        run_here = sweep_run._run_here

        async def stop(recipe: Any, name: str, arguments: list[str]) -> str | None:
            if "max_steps=4" in arguments and "max_steps_off_policy=2" in name:
                raise ConnectionError("cut off")
            begun.append(name)
            return await run_here(recipe, name, arguments)

        monkeypatch.setattr(sweep_run, "_run_here", stop)
        with pytest.raises((SystemExit, ExceptionGroup)):
            study(staleness_study, folder, *keys)
        assert begun[-1] == f"{K}=0,num_substeps=2,seed=1" and not (folder / "rows.parquet").exists()
        monkeypatch.setattr(sweep_run, "_run_here", run_here)
        capsys.readouterr()
        study(staleness_study, folder, *keys)
        said = capsys.readouterr().out
        assert f"(1/2) tis/{K}=0,num_substeps=2,seed=1 was finished" in said
        assert "Expected: 1 runs to go" in said
        assert "In all 2 runs samples were exactly K updates old" in said

        rows = pandas.read_parquet(folder / "rows.parquet")
        trained = rows[rows["groups/sampled"].notna()]
        assert trained.groupby(K)["async/staleness_max"].apply(list).to_dict() == {0: [0, 0, 0, 0], 2: [0, 1, 2, 2]}
        assert trained["off_policy/ratio_max"].notna().all()  # the correction of tis was computed
        runs = pandas.read_parquet(folder / "runs.parquet")
        assert runs[["part", K, "youngest", "oldest"]].values.tolist() == [["tis", 0, 0.0, 0.0], ["tis", 2, 2.0, 2.0]]
        of_two = trained[trained[K] == 2].iloc[2:]
        aged = of_two[of_two["progress/sampled_tokens"] <= runs["tokens"].min()]
        assert len(aged) in (1, 2)
        assert runs["kl"].iloc[1] == pytest.approx(aged["optim/kl_sample_train_v2"].mean())
        config = read_json_object(folder / "tis" / f"{K}=2,num_substeps=2,seed=1" / "config.json", "")
        assert (config["advantage"]["baseline"], config["loss_fn"]) == ("zscore", "ppo")
        assert "Reward on held-out questions at" in (folder / "staleness_study.md").read_text()

    def test_all_losses_have_the_same_advantages(self) -> None:
        cli = staleness_study.CLIConfig(quick=True)
        for part in staleness_study.parts(cli):
            for run in part.planned():
                advantage = run.config["advantage"]
                assert (advantage["baseline"], advantage["scale"]) == ("zscore", "sequence"), part.name
        assert {part.name for part in staleness_study.parts(cli)} == set(LOSSES)

    def test_measures_at_equal_tokens(self) -> None:
        tokens = [10.0, 20.0, 30.0, 40.0]
        rows = pandas.DataFrame({
            K: 1,
            "progress/sampled_tokens": [*tokens, 40.0],
            "env/all/reward/total": [0.1, 0.2, 0.5, 0.9, math.nan],
            "test/env/all/reward/total": [0.0, math.nan, 0.9, math.nan, 0.8],
            "optim/kl_sample_train_v2": [9.0, 0.1, 0.3, 7.0, math.nan],
            "optim/entropy": [1.0, 0.8, 0.6, 0.4, math.nan],
            "optim/grad_norm": [1.0, 2.0, 4.0, 8.0, math.nan],
            "async/staleness_min": [0.0, 1.0, 1.0, 1.0, math.nan],
            "async/staleness_max": [0.0, 1.0, 1.0, 1.0, math.nan],
        })  # fmt: skip
        of = staleness_study.measure(rows, 30.0)
        # Evaluations stand at 0, 20 and 40 tokens: 30 is half way from 0.9 to 0.8. The first step is younger than K.
        assert of["held_out"] == pytest.approx(0.85) and of["held_out_end"] == 0.8 and of["fall"] == pytest.approx(0.1)
        assert of["kl"] == pytest.approx(0.2) and of["kl_max"] == 9.0 and of["grad_norm"] == 3.0
        assert (of["reward"], of["entropy"], of["tokens"]) == (0.5, 0.6, 40.0)
        assert (of["youngest"], of["oldest"]) == (1.0, 1.0) and math.isnan(of["clipped"])

    def test_words_follow_the_intervals(self) -> None:
        cli = staleness_study.CLIConfig(losses=("ppo", "cispo"), staleness=(0, 8), substeps=(4,), steps=9)
        held_out = {("ppo", 0): 0.9, ("ppo", 8): 0.8, ("cispo", 0): 0.9, ("cispo", 8): 0.3}
        runs = pandas.DataFrame([
            {"part": loss, K: k, "num_substeps": 4, "seed": seed, "held_out": value + 0.01 * seed,
             "youngest": float(k), "oldest": float(k), "fall": 0.5 if (loss, k, seed) == ("cispo", 8, 1) else 0.1}
            for (loss, k), value in held_out.items() for seed in (0, 1)
        ])  # fmt: skip
        exact, pairs, lost, broke = staleness_study.sentences(cli, runs)
        assert exact.startswith("In all 8 runs")
        assert "1 of 1 pairs" in pairs and "ppo and cispo (0.50 [0.50, 0.50])" in pairs
        assert "ppo -0.10 [-0.10, -0.10], cispo -0.60 [-0.60, -0.60]" in lost
        assert (
            broke
            == "Held-out reward fell by more than 0.25 from its best in runs of: cispo at K=8, num_substeps=4 (1 of 2)."
        )
        runs.loc[0, "oldest"] = 5.0
        assert staleness_study.sentences(cli, runs)[0].startswith("In 1 of 8 runs samples were not K updates old")

    @pytest.mark.parametrize(
        ("keys", "named"),
        [({"losses": ("reinforce",)}, "losses=reinforce"), ({"staleness": (-1,)}, "staleness"),
         ({"staleness": (8,), "steps": 8}, "steps=8"), ({"seeds": (1, 1)}, "seeds")],
    )  # fmt: skip
    def test_settings_that_make_no_study_are_refused(self, keys: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigurationError, match=named):
            staleness_study.CLIConfig(**keys)


class TestAnchors:
    def test_a_run_from_its_keys_to_its_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "study"
        study(anchor_study, folder, "tasks=arithmetic", "seeds=1", "set.max_steps=2", "set.eval_every=1", *SMALL)
        said = capsys.readouterr().out
        assert "1 runs in" in said and "Expected: 1 runs to go" in said
        (run,) = pandas.read_parquet(folder / "runs.parquet").to_dict("records")
        rows = pandas.read_parquet(folder / "rows.parquet")
        held_out = rows["test/env/all/correct"].dropna().tolist()
        assert len(held_out) == 3 and (run["right_before"], run["right_after"]) == (held_out[0], held_out[-1])
        text = (folder / "anchor_study.md").read_text()
        assert "| arithmetic |" in text and "(tinker-cookbook)" in text and "Full form, seed 1" in text
        study(anchor_study, folder, "tasks=arithmetic", "seeds=1", "set.max_steps=2", "set.eval_every=1", *SMALL)
        assert "All runs were finished" in capsys.readouterr().out

    def test_every_task_is_planned_in_both_forms(self) -> None:
        for quick in (True, False):
            planned = {part.name: part.planned() for part in anchor_study.parts(anchor_study.CLIConfig(quick=quick))}
            longer = [] if quick else ["arithmetic_99"]
            assert list(planned) == ["reverse_text", "alphabet_sort", "wordle", "arithmetic", *longer]
            assert all(len(runs) == 3 for runs in planned.values())
            assert {runs[0].config.get("anchor") for runs in planned.values()} == {*list(planned)[:3], None}

    def test_words_follow_the_intervals(self) -> None:
        cli = anchor_study.CLIConfig(tasks=("wordle", "arithmetic"), seeds=(0, 1))
        runs = pandas.DataFrame([
            {"part": name, "seed": seed, "rise": rise + 0.01 * seed, "right_best": best}
            for name, rise, best in (("wordle", -0.3, 0.5), ("arithmetic", 0.5, 0.99)) for seed in (0, 1)
        ])  # fmt: skip
        rose, fell, solved = anchor_study.sentences(cli, runs)
        assert rose.startswith("Held-out reward rose: arithmetic 0.5") and "wordle" not in rose
        assert fell.startswith("Held-out reward fell: wordle -0.2")
        assert solved == "Of 2 runs of arithmetic 2 came to 0.99 right."
        runs["rise"] = [0.1, -0.1, 0.5, 0.5]
        assert anchor_study.sentences(cli, runs)[1].startswith("Held-out reward neither rose nor fell by more than")

    def test_an_unknown_task_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="tasks=chess is unknown"):
            anchor_study.CLIConfig(tasks=("chess",))


class TestRank:
    def test_the_vertex_is_found_and_an_end_stays_an_end(self) -> None:
        rates = (1e-4, 1e-3, 1e-2, 1e-1)
        # -(x + 2.3)^2 over x = log10(rate) has its top at -2.3.
        assert rank_study.optimum(rates, [-((x + 2.3) ** 2) for x in (-4, -3, -2, -1)], 1) == pytest.approx(-2.3)
        assert rank_study.optimum(rates, [(x + 2.7) ** 2 for x in (-4, -3, -2, -1)], -1) == pytest.approx(-2.7)
        assert rank_study.optimum(rates, [1.0, 2.0, 3.0, 4.0], 1) == -1.0
        assert rank_study.optimum(rates, [1.0, 2.0, 3.0, 4.0], -1) == -4.0
        assert rank_study.optimum(rates, [1.0, 3.0, 2.0, math.nan], 1) == pytest.approx(-3 + 1 / 6)
        assert rank_study.optimum(rates, [1.0, 2.0, 3.0, math.nan], 1) == -2.0  # beside a run that diverged

    def test_words_follow_the_intervals(self) -> None:
        cli = rank_study.CLIConfig(algorithms=("sft", "rl"), ranks=(1, 64), rates=(1e-3, 1e-2, 1e-1), seeds=(0, 1))
        tops = {("sft", 1): -2.2, ("sft", 64): -1.8, ("rl", 1): -2.1, ("rl", 64): -2.1}
        runs = pandas.DataFrame([
            {"part": name, "lora_rank": rank, "learning_rate": rate, "seed": seed,
             "value": (-1 if name == "rl" else 1) * (math.log10(rate) - top - 0.01 * seed) ** 2 + 0.1}
            for (name, rank), top in tops.items() for rate in (1e-3, 1e-2, 1e-1) for seed in (0, 1)
        ])  # fmt: skip
        sft, at_best, rl, _ = rank_study.sentences(cli, runs)
        assert "from rank 1 to 64 the best rate moves by 0.40 [0.40, 0.40] decades" in sft
        assert "depends on the rank" in sft and "edge" not in sft
        assert "rl: from rank 1 to 64 the best rate moves by" in rl and "no dependence is seen" in rl
        assert "rank 1 minus rank 64" in at_best
        full = [
            {"part": "full", "seed": seed, "learning_rate": rate, "value": (math.log10(rate) + 2.8) ** 2}
            for rate in (1e-4, 1e-3, 1e-2, 1e-1) for seed in (0, 1)
        ]  # fmt: skip
        with_full = pandas.concat([runs, pandas.DataFrame(full)])
        said = rank_study.sentences(
            rank_study.CLIConfig(algorithms=("sft",), ranks=(1, 64), rates=(1e-3, 1e-2, 1e-1), full=True), with_full
        )[-1]
        # The rank's optima are -1.8 and -1.79, so 1 and 1.01 decades above.
        assert (
            said.startswith("full fine-tuning: its best rate is 1.6e-03")
            and "higher by 1.00 [0.94, 1.07] decades" in said
        )
        (of_sft, _) = rank_study.tables(cli, runs)
        assert [row[0] for row in of_sft.rows] == ["1", "64"] and of_sft.rows[0][-1].startswith("6.4e-03")

    @pytest.mark.parametrize(
        ("keys", "named"),
        [({"rates": (1e-3, 1e-2)}, "rates"), ({"ranks": (4, 1)}, "ranks"), ({"algorithms": ("ppo",)}, "algorithms=ppo"),
         ({"algorithms": ("rl",), "full": True}, "full=True")],
    )  # fmt: skip
    def test_settings_that_make_no_study_are_refused(self, keys: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigurationError, match=named):
            rank_study.CLIConfig(**keys)

    @pytest.mark.slow
    def test_ranks_side_by_side_on_one_base_and_full_fine_tuning(self, tmp_path: Path) -> None:
        keys = (
            "quick=True",
            "algorithms=sft",
            "ranks=1,8",
            "rates=1e-4,1e-3,1e-2",
            "seeds=0",
            "full=True",
            "set.max_steps=2",
        )
        study(rank_study, tmp_path / "study", *keys)
        runs = pandas.read_parquet(tmp_path / "study" / "runs.parquet")
        assert runs["part"].tolist() == ["sft"] * 6 + ["full"] * 4  # at 1e-5 too
        # The same data and base model: before training all have the same held-out loss, adapters or not.
        assert runs["before"].max() - runs["before"].min() < 1e-4
        assert (runs["value"] < runs["before"]).sum() >= 7
        assert "full fine-tuning: its best rate is" in (tmp_path / "study" / "rank_study.md").read_text()


class TestFullFineTuning:
    def datum(self, tokens: list[int], targets: list[int], weights: list[float]) -> tinker.Datum:
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_torch(torch.tensor(targets)),
                "weights": tinker.TensorData.from_torch(torch.tensor(weights)),
            },
        )

    def test_the_loss_is_a_weighted_sum_and_padding_adds_nothing(self) -> None:
        class Bigram(torch.nn.Module):
            """Logits of a table, whatever the mask."""

            device = torch.device("cpu")

            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Parameter(torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, -1.0], [1.0, 1.0, 0.5]]))

            def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> Any:
                assert attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
                return type("Output", (), {"logits": self.table[tokens]})

        model = Bigram()
        data = [self.datum([0, 1, 2], [1, 2, 0], [0.0, 1.0, 0.5]), self.datum([1], [0], [2.0])]
        logprobs = full_fine_tuning.logprobs_of(model, data)
        rows = model.table.detach().double().log_softmax(-1)
        expected = -(1.0 * rows[1, 2] + 0.5 * rows[2, 0] + 2.0 * rows[1, 0])
        loss = full_fine_tuning.loss_of(logprobs, data)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert [row.to_torch().shape[0] for row in full_fine_tuning.rows_of(logprobs, data)] == [3, 1]

    @pytest.mark.slow
    def test_it_begins_where_an_adapter_does_and_learns(self, tmp_path: Path) -> None:
        from recipes import sl_basic

        keys = ("max_steps=2", "seed=3")
        run_recipe(sl_basic.CLIConfig, sl_basic.main, argv=[*keys, "eval_every=2", f"log_path={tmp_path / 'adapter'}"])
        run_recipe(full_fine_tuning.CLIConfig, full_fine_tuning.main, argv=[*keys, f"log_path={tmp_path / 'full'}"])
        adapter, full = (read_metrics(tmp_path / name) for name in ("adapter", "full"))
        for key in ("test/nll", "train_mean_nll"):
            assert full[0][key] == pytest.approx(adapter[0][key], abs=1e-4)
        assert full[-1]["test/nll"] < full[0]["test/nll"]
        assert (tmp_path / "full" / "model" / "model.safetensors").is_file()
