"""The benchmark of records at a small size: what a token costs on disk, and that everything is there."""

from benchmarks.records import RecordsConfig, make_step, measure

MOST_BYTES = 25e6 / (128 * 16 * 1000)
"""per sampled token, all files of a step together"""


def test_a_token_costs_what_was_promised() -> None:
    found = measure(RecordsConfig(groups=32, members=8, tokens=1000, num_groups_to_log=1))
    assert found["bytes_per_sampled_token"] < MOST_BYTES
    assert found["megabytes_of_all_rollouts"] < found["megabytes"]


def test_every_token_of_the_step_is_trained_on() -> None:
    step = make_step(RecordsConfig(groups=3, members=2, tokens=5))
    assert len(step.data_D) == 6
    assert all(int((datum.loss_fn_inputs["advantages"].to_numpy() != 0).sum()) == 5 for datum in step.data_D)
