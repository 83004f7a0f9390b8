"""DPO in a loop of one's own, on the engine: the same numbers as the formula, and a reference that stays where the run began."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import FakeTokenizer
from tests.preference.test_train_dpo import PairsBuilder, datum, make_config
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.runs.evaluation import TrainingClientEvaluator
from tinker_cookbook.runs.ml_log import JsonLogger, read_metrics
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.supervised.data import SupervisedDatasetFromList


class Steps(TrainingClientEvaluator):
    async def __call__(self, training_client: Any) -> dict[str, float]:
        return {"test/evaluated": 1.0}


def test_two_steps_and_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(tmp_path, learning_rate=1e-3, eval_every=2, lora_rank=4)
    service = backends.create_service_client("local", None)
    trainer, reference = train_dpo.create_dpo_clients(config, service)
    dataset, _ = PairsBuilder()()
    logger, tokenizer = JsonLogger(tmp_path), FakeTokenizer()

    def update(client: Any, step: int) -> None:
        train_dpo.do_update(
            0,
            step,
            3,
            3,
            config,
            client,
            reference,
            [Steps()],
            [],
            dataset,
            logger,
            str(tmp_path),
            tokenizer,  # pyright: ignore[reportArgumentType]
        )

    update(trainer, 0)
    update(trainer, 1)
    first, second = read_metrics(tmp_path)
    assert first["dpo_loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-3), (
        "policy and reference are one"
    )
    assert second["margin"] > first["margin"] and second["dpo_loss"] < first["dpo_loss"]
    assert ("test/evaluated" in first, "test/evaluated" in second) == (True, False)
    assert (first["num_pairs"], second["step"]) == (2, 1)
    assert first["optim/lr"] == first["learning_rate"] == 1e-3
    assert "Chosen example:" in caplog.text and "Rejected example:" in caplog.text

    saved = trainer.save_state("two").result().path  # pyright: ignore[reportAttributeAccessIssue]
    record = CheckpointRecord("two", batch=2, state_path=saved)
    resumed, anew = train_dpo.create_dpo_clients(config, service, record)
    prompt = datum([1, 2, 10, 3]).model_input
    assert anew.compute_logprobs(prompt).result() == reference.compute_logprobs(prompt).result()  # pyright: ignore[reportAttributeAccessIssue]
    update(resumed, 2)
    update(trainer, 2)
    assert read_metrics(tmp_path)[2]["dpo_loss"] == pytest.approx(read_metrics(tmp_path)[3]["dpo_loss"], abs=1e-6)
    with pytest.raises(ConfigurationError, match="checkpoint 'x' has no state_path"):
        train_dpo.create_dpo_clients(config, service, CheckpointRecord("x"))
    broken = SupervisedDatasetFromList([1], 1, lambda _: datum([1, 2, 3]))
    with pytest.raises(DataValidationError, match="has 1 datums; DPO takes chosen and rejected alternately"):
        train_dpo.do_update(1, 0, 3, 9, config, trainer, reference, [], [], broken, logger, tmp_path, tokenizer)  # pyright: ignore[reportArgumentType]
