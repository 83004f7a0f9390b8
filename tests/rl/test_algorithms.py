"""Names and settings of losses: presets, what is refused before a run, and what a loss is given of a datum."""

from typing import Any

import numpy as np
import pytest
import tinker

from tests.rl.handmade import DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.algorithms import LOSS_FNS, PRESETS, check_loss, get_preset, loss_datum


class TestLosses:
    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_name_losses_with_settings_that_they_have(self, name: str) -> None:
        preset = get_preset(name)
        check_loss(preset.loss_fn, preset.loss_fn_config, "tinker")

    @pytest.mark.parametrize(
        ("loss_fn", "config", "message"),
        [
            ("reinforce", None, "unknown"),
            ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold"),
            ("ppo", {"epsilon": 0.2}, "epsilon"),
            ("ppo", {"temperature": 0.7}, "local engine"),
        ],
    )
    def test_what_a_loss_does_not_have_is_refused(self, loss_fn: str, config: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check_loss(loss_fn, config, "tinker")

    def test_an_unknown_preset_lists_the_known(self) -> None:
        with pytest.raises(ConfigurationError, match="dapo"):
            get_preset("grppo")

    @pytest.mark.parametrize("loss_fn", LOSS_FNS)
    def test_gspo_alone_gets_the_mask(self, loss_fn: str) -> None:
        (datum, *_) = DATA
        inputs = loss_datum(datum, loss_fn).loss_fn_inputs
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
