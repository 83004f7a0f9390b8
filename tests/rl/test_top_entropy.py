"""Training on the tokens of highest entropy: which ones, with golden numbers, and where the setting is refused."""

from pathlib import Path

import chz
import numpy as np
import pytest

from tests.rl.handmade import DATA, array
from tests.rl.loop import make_config
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.config import check_config
from tinker_cookbook.rl.top_entropy import keep_top_entropy, top_entropy_masks


def test_the_quantile_is_over_the_sampled_tokens_of_the_whole_batch() -> None:
    """Sampled: 0.1, 0.5, 0.9, 0.2 and 0.3; the upper two fifths begin at 0.38, two fifths of the way from 0.3
    to 0.5.
    """
    entropies = [np.array([9.0, 0.1, 0.5]), np.array([0.9, 0.2, 8.0, 0.3])]
    masks = [np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])]
    kept, threshold = top_entropy_masks(entropies, masks, 0.4)
    assert [mask.tolist() for mask in kept] == [[False, False, True], [True, False, False, False]]
    assert threshold == pytest.approx(0.38)
    everything, _ = top_entropy_masks(entropies, masks, 1.0)
    assert [mask.tolist() for mask in everything] == [(mask > 0).tolist() for mask in masks]


def test_ties_are_all_kept() -> None:
    kept, _ = top_entropy_masks([np.full(6, 0.5)], [np.ones(6)], 0.2)
    assert kept[0].all()


def test_the_others_lose_their_advantage_alone() -> None:
    """DATA has tokens 10 and 11, and 12 to 14, with advantage 2: entropies that grow with the position keep the last ones."""
    entropies = [np.arange(datum.model_input.length, dtype=np.float32) for datum in DATA]
    changed, metrics = keep_top_entropy(DATA, entropies, 0.2)
    kept = [array(datum, "advantages")[array(datum, "mask") > 0].tolist() for datum in changed]
    assert kept == [[0.0, 0.0], [0.0, 0.0, 2.0]]
    for before, after in zip(DATA, changed, strict=True):
        assert array(after, "logprobs").tolist() == array(before, "logprobs").tolist()
    assert metrics["top_entropy/share"] == pytest.approx(0.2)


def test_where_it_cannot_be_carried_out_it_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, top_entropy_share=0.2)
    check_config(config)
    for change in (
        {"stream_minibatch_config": train.StreamMinibatchConfig()},
        {"loss_fn": "dro"},
        {"loss_fn": lambda logprobs, sampling_logprobs, advantages, mask: logprobs.sum()},
    ):
        with pytest.raises(ConfigurationError, match="top_entropy_share sets advantages of a whole batch"):
            check_config(chz.replace(config, **change))


def test_on_the_hosted_service_it_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    config = make_config(tmp_path, top_entropy_share=0.2, backend="tinker", model_name="Qwen/Qwen3-8B")
    with pytest.raises(ConfigurationError, match="only the local engine returns, not backend=tinker"):
        check_config(config)
