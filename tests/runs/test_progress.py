"""What a run has sampled and trained on, counted over resumes."""

import numpy as np
import tinker

from tinker_cookbook.runs.progress import Progress, count_trained_tokens
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord


def test_rows_cumulate_and_checkpoints_keep_what_the_row_before_them_said() -> None:
    now = [100.0]
    state: dict[str, object] = {}
    progress = Progress(state, clock=lambda: now[0])
    now[0] = 103.0
    first = progress.row(sampled_tokens=10, trained_tokens=7)
    assert first == {"progress/sampled_tokens": 10, "progress/trained_tokens": 7, "progress/seconds": 3.0}
    record = CheckpointRecord.from_dict({"name": "000001", "batch": 1, **state})
    now[0] = 110.0
    assert progress.row(5, 4)["progress/sampled_tokens"] == 15  # done again after the resume, and counted once

    now[0] = 1000.0
    resumed = Progress({}, record, clock=lambda: now[0])
    now[0] = 1002.0
    row = resumed.row(5, 4)
    assert row == {"progress/sampled_tokens": 15, "progress/trained_tokens": 11, "progress/seconds": 5.0}


def test_what_is_trained_on_has_a_weight_or_an_advantage() -> None:
    def datum(**inputs: list[float]) -> tinker.Datum:
        tensors = {key: tinker.TensorData.from_numpy(np.array(values, np.float32)) for key, values in inputs.items()}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=tensors)

    assert count_trained_tokens([]) == 0
    data = [datum(advantages=[0.0, -0.5, 0.25], mask=[1.0, 1.0, 1.0]), datum(weights=[0.0, 0.0, 1.0])]
    assert count_trained_tokens(data) == 3
