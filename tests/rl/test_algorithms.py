"""Names and settings of losses: presets, what is refused before a run, and what a loss is given of a datum."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker

from tests.fakes import said
from tests.rl.handmade import DATA, trajectory, turn
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.algorithms import LOCAL_LOSSES, LOSS_FNS, PRESETS, check_loss, get_preset
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.minibatch import Update


class TestLosses:
    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_name_losses_with_settings_that_they_have(self, name: str) -> None:
        preset = get_preset(name)
        backend = "local" if preset.loss_fn in LOCAL_LOSSES else "tinker"
        check_loss(preset.loss_fn, preset.loss_fn_config, backend)

    @pytest.mark.parametrize(
        ("loss_fn", "config", "message"),
        [
            ("reinforce", None, "unknown"),
            ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold"),
            ("ppo", {"epsilon": 0.2}, "epsilon"),
            ("ppo", {"temperature": 0.7}, "local engine"),
            ("stable_reinforce", {"weight_cap": 3.0}, "'weight_cap', which only the local engine supports"),
            ("stable_reinforce", {"clip_low_threshold": 0.8}, "takes .*'weight_cap'"),
        ],
    )
    def test_what_a_loss_does_not_have_is_refused(self, loss_fn: str, config: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check_loss(loss_fn, config, "tinker")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"weight_cap": 0.0}, "weight_cap=0 trains nothing"),
            ({"token_ratio_low": 3.0, "token_ratio_high": 2.0}, "token_ratio_low=3.0 is above token_ratio_high=2.0"),
            ({"sequence_log_ratio_bound": -1.0}, "at least 0"),
            ({"verify_provenance": 0.5}, "must be 1 or 0"),
        ],
    )
    def test_settings_of_stable_reinforce_are_checked_before_a_run(self, config: Any, message: str) -> None:
        check_loss("stable_reinforce", {"weight_cap": 3.0, "verify_provenance": 1}, "local")
        with pytest.raises(ConfigurationError, match=message):
            check_loss("stable_reinforce", config, "local")

    @pytest.mark.parametrize("loss_fn", sorted(LOCAL_LOSSES))
    def test_a_loss_of_the_local_engine_is_refused_by_name_on_the_hosted_service(self, loss_fn: str) -> None:
        check_loss(loss_fn, None, "local")
        with pytest.raises(ConfigurationError, match=f"loss_fn={loss_fn} .* not with backend=tinker"):
            check_loss(loss_fn, None, "tinker")

    def test_a_temperature_of_sapo_is_positive(self) -> None:
        check_loss("sapo", {"temperature_negative": 1.5}, "local")
        with pytest.raises(ConfigurationError, match="temperature_negative=0: must be positive"):
            check_loss("sapo", {"temperature_negative": 0.0}, "local")

    def test_a_preset_says_what_it_sets_as_keys(self) -> None:
        assert str(get_preset("dapo")) == (
            "advantage.baseline=zscore advantage.scale=token loss_fn=ppo clip_low_threshold=0.8 clip_high_threshold=1.28 "
            "remove_constant_reward_groups=True"
        )
        assert str(get_preset("icepop")).endswith(
            "off_policy_correction.mode=mask off_policy_correction.level=token off_policy_correction.cap=5.0 "
            "off_policy_correction.low=0.5"
        )

    def test_stable_reinforce_takes_no_datum_without_provenance(self) -> None:
        with pytest.raises(DataValidationError, match="no sequence_id"):
            Update.loss_datum(DATA[0], "stable_reinforce")

    def test_an_unknown_preset_lists_the_known(self) -> None:
        with pytest.raises(ConfigurationError, match="dapo"):
            get_preset("grppo")

    @pytest.mark.parametrize("loss_fn", LOSS_FNS)
    def test_gspo_alone_gets_the_mask(self, loss_fn: str) -> None:
        (datum, *_) = trajectory_to_data(trajectory(turn([1], replace(said([2, 3]), sequence_id="s"))), 1.0)
        given = Update.loss_datum(datum, loss_fn)
        assert given.loss_fn_input_spans == datum.loss_fn_input_spans and given.loss_fn_input_spans
        inputs = given.loss_fn_inputs
        expected = {"target_tokens", "logprobs", "advantages"} | (
            {"sequence_ratio_mask"} if loss_fn == "gspo" else set()
        )
        assert set(inputs) == expected


def test_a_loop_of_ones_own_takes_the_mask_off_by_hand() -> None:
    inputs = {key: tinker.TensorData.from_numpy(np.ones(2, dtype=np.float32)) for key in ("logprobs", "mask")}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    assert list(train._remove_mask(datum).loss_fn_inputs) == ["logprobs"] and list(datum.loss_fn_inputs) == [
        "logprobs",
        "mask",
    ]
