"""The benchmark of the pacings at a small size, on its scripted service."""

import asyncio
from unittest import mock

import numpy as np
import pytest
import tinker

from benchmarks import pacing
from benchmarks.report import Report
from benchmarks.scripted import ScriptedTrainer
from tests.rl.arena import run
from tinker_cookbook import backends

DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1]),
    loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(np.array([2]))},
)


def test_every_pacing_accounts_for_the_same_groups() -> None:
    config = pacing.PacingConfig(
        steps=3, groups=4, members=2, fast_seconds=0.0, slow_seconds=0.02, sample_seconds=0.0, train_seconds=0.01
    )
    report = Report("pacing", "tiny", "float32", "cpu", {}, [])
    with mock.patch.object(backends, "create_service_client", lambda *_: pacing.scripted_service(config)):
        asyncio.run(pacing.compare(report, "scripted", pacing.scripted_config, config))
    (table,) = report.tables
    assert [row[0] for row in table.rows] == list(pacing.pacings(config))
    for name, *_, trained, filtered, dropped, _ in table.rows:
        assert int(trained) + int(filtered) + int(dropped) == 12
        assert name.endswith("drop") or dropped == "0"
    assert len({pacing.latency(config, 0, place) for place in range(40)}) == 2


def test_a_pass_of_the_script_takes_its_share_of_the_time() -> None:
    trainer = ScriptedTrainer("tiny_chat", sample_seconds=0.0, train_seconds=8.0, batch=4)

    async def main() -> list[float]:
        now = asyncio.get_running_loop().time()
        ends: list[float] = []
        for data in (1, 3):
            trainer.forward_backward([DATUM] * data, "importance_sampling").cancel()  # pyright: ignore
            ends.append(trainer.pass_ends - now)
        return ends

    first, second = run(main())
    assert (first, second) == pytest.approx((2.0, 8.0))
