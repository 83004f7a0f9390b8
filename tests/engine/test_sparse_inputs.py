"""Loss inputs in every form that a Datum takes: sparse, torch tensors, lists. All mean the same numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import tinker
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.engine.helpers import (
    VOCABULARY,
    assert_repeats,
    cross_entropy_datum,
    datum,
    drop_gradients,
    gradients,
    prompt,
    random_tokens,
)
from tinker_local_backend import RequestError, TrainingClient

N, K = 6, 8
TOKENS = random_tokens(N, 0)


def top_k(seed: int, length: int = N, width: int = K, share: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Targets and weights (N, K); where the weight is 0 the target is too, as in distillation from top-k logprobs."""
    rng = np.random.default_rng(seed)
    weights = (rng.normal(size=(length, width)) * (rng.random((length, width)) < share)).astype(np.float32)
    targets = np.where(weights != 0, rng.integers(1, VOCABULARY, (length, width)), 0)
    return targets, weights


def is_sparse(tensor: tinker.TensorData) -> bool:
    return tensor.sparse_crow_indices is not None


def result(client: TrainingClient, data: list[tinker.Datum], loss_fn: str = "cross_entropy"):
    output = client.forward_backward(data, loss_fn).result()
    found = gradients(client)
    drop_gradients(client)
    return output, found


def assert_same_result(client: TrainingClient, data: list[tinker.Datum], other: list[tinker.Datum], loss_fn: str):
    (output, found), (expected_output, expected) = result(client, data, loss_fn), result(client, other, loss_fn)
    assert_repeats(found, expected)
    assert_repeats(output.metrics, expected_output.metrics)
    for left, right in zip(output.loss_fn_outputs, expected_output.loss_fn_outputs, strict=True):
        assert_repeats(left["logprobs"].to_numpy(), right["logprobs"].to_numpy())


def test_two_dimensional_torch_tensors_arrive_sparse_and_give_the_dense_result(training: TrainingClient) -> None:
    targets, weights = top_k(1)
    torch_inputs: dict = {"target_tokens": torch.from_numpy(targets), "weights": torch.from_numpy(weights)}
    sparse = tinker.Datum(model_input=prompt(TOKENS), loss_fn_inputs=torch_inputs)
    assert all(is_sparse(tensor) for tensor in sparse.loss_fn_inputs.values())
    dense = datum(TOKENS, target_tokens=targets, weights=weights)
    assert not any(is_sparse(tensor) for tensor in dense.loss_fn_inputs.values())
    assert_same_result(training, [sparse], [dense], "cross_entropy")
    assert any(matrix.any() for matrix in result(training, [sparse])[1].values())


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    length=st.integers(1, 9),
    width=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.1, 0.4]),
    sparse_targets=st.booleans(),
    sparse_weights=st.booleans(),
)
def test_any_mixture_of_sparse_and_dense_is_the_dense_result(
    training: TrainingClient,
    seed: int,
    length: int,
    width: int,
    share: float,
    sparse_targets: bool,
    sparse_weights: bool,
) -> None:
    """Token 0 with a weight, weights without a listed target, rows and tensors without any entry."""
    targets, weights = top_k(seed, length, width, share)
    weights[0, 0], targets[0, 0] = 0.5, 0
    tokens = random_tokens(length, seed)
    mixed = datum(
        tokens,
        target_tokens=as_csr(targets) if sparse_targets else targets,
        weights=as_csr(weights) if sparse_weights else weights,
    )
    plain = datum(tokens, target_tokens=targets, weights=weights)
    other = cross_entropy_datum(4, 4)
    assert_same_result(training, [mixed, other], [plain, other], "cross_entropy")


def as_csr(array: np.ndarray, **changes: object) -> tinker.TensorData:
    """The array as sparse TensorData, whether or not that saves space; `changes` break it."""
    rows, columns = np.nonzero(array)
    fields: dict = {
        "data": array[rows, columns],
        "dtype": "int64" if array.dtype.kind == "i" else "float32",
        "shape": list(array.shape),
        "sparse_crow_indices": np.searchsorted(rows, np.arange(len(array) + 1)).tolist(),
        "sparse_col_indices": columns.tolist(),
    }
    return tinker.TensorData(**{**fields, **changes})


CORNERS = np.zeros((N, K), dtype=np.float32)
CORNERS[0, 0], CORNERS[2, 3], CORNERS[2, 5], CORNERS[5, 7] = 1, 2, 3, 4
BROKEN = {
    "column beyond the shape": {"sparse_col_indices": [0, 3, K, 7]},
    "negative column": {"sparse_col_indices": [0, 3, -1, 7]},
    "columns out of order": {"sparse_col_indices": [0, 5, 3, 7]},
    "a column twice": {"sparse_col_indices": [0, 3, 3, 7]},
    "too few columns": {"sparse_col_indices": [0, 3, 5]},
    "too few values": {"data": np.ones(3, dtype=np.float32)},
    "too many values": {"data": np.ones(5, dtype=np.float32)},
    "too few rows": {"sparse_crow_indices": [0, 1, 1, 3, 4]},
    "too many rows": {"sparse_crow_indices": [0, 1, 1, 3, 3, 3, 4, 4]},
    "row pointers that fall": {"sparse_crow_indices": [0, 3, 1, 3, 3, 3, 4]},
    "row pointers that start late": {"sparse_crow_indices": [1, 1, 1, 3, 3, 3, 4]},
    "row pointers that end early": {"sparse_crow_indices": [0, 1, 1, 3, 3, 3, 3]},
    "empty row pointers": {"sparse_crow_indices": []},
    "a row pointer that is text": {"sparse_crow_indices": [0, 1, 1, "3", 3, 3, 4]},
    "a column that is missing": {"sparse_col_indices": [0, None, 5, 7]},
    "ragged row pointers": {"sparse_crow_indices": [[0, 1, 1], [3]]},
    "a column beyond every integer": {"sparse_col_indices": [0, 3, 5, 2**70]},
    "no columns": {"sparse_col_indices": None},
    "no row pointers": {"sparse_crow_indices": None, "shape": None},
    "no shape": {"shape": None},
    "one dimension": {"shape": [N]},
    "three dimensions": {"shape": [N, K, 1]},
    "negative shape": {"shape": [N, -1]},
}


@pytest.mark.parametrize("field", ["weights", "target_tokens"])
@pytest.mark.parametrize("name", BROKEN)
def test_an_inconsistent_sparse_tensor_is_named(training: TrainingClient, name: str, field: str) -> None:
    array = CORNERS if field == "weights" else CORNERS.astype(np.int64)
    changes = dict(BROKEN[name])
    if field == "target_tokens" and "data" in changes:
        changes["data"] = changes["data"].astype(np.int64)
    dense = {"target_tokens": CORNERS.astype(np.int64), "weights": CORNERS}
    good = datum(TOKENS, **dense)
    bad = datum(TOKENS, **{**dense, field: as_csr(array, **changes)})
    with pytest.raises(RequestError, match=rf"data\[1\]\.loss_fn_inputs\['{field}'\]"):
        training.forward_backward([good, bad], "cross_entropy").result()
    assert training._run.state.gradients is None


def test_a_sparse_tensor_of_another_shape_is_named(training: TrainingClient) -> None:
    bad = datum(TOKENS, target_tokens=CORNERS.astype(np.int64), weights=as_csr(CORNERS[:, :4]))
    with pytest.raises(RequestError, match=r"data\[0\].*\['weights'\] has shape \(6, 4\), target_tokens has \(6, 8\)"):
        training.forward_backward([bad], "cross_entropy").result()


def test_a_listed_value_that_is_no_number_is_named(training: TrainingClient) -> None:
    weights = as_csr(CORNERS, data=np.array([1, 2, np.nan, 4], dtype=np.float32))
    bad = datum(TOKENS, target_tokens=CORNERS.astype(np.int64), weights=weights)
    with pytest.raises(RequestError, match=r"data\[0\]\.loss_fn_inputs\['weights'\]\[2\] is nan"):
        training.forward_backward([bad], "cross_entropy").result()


def test_a_target_outside_the_vocabulary_is_named_by_row_and_column(training: TrainingClient) -> None:
    targets = CORNERS.astype(np.int64)
    targets[2, 5] = VOCABULARY
    for form in (targets, as_csr(targets)):
        with pytest.raises(RequestError, match=r"data\[0\]\.target_tokens\[2\]\[5\] is 1536, outside the vocabulary"):
            training.forward_backward([datum(TOKENS, target_tokens=form, weights=CORNERS)], "cross_entropy").result()


def test_targets_of_width_zero_are_refused(training: TrainingClient) -> None:
    bad = datum(TOKENS, target_tokens=np.zeros((N, 0), dtype=np.int64), weights=np.zeros((N, 0), dtype=np.float32))
    with pytest.raises(RequestError, match=r"\['target_tokens'\] has shape \(6, 0\).*K at least 1"):
        training.forward_backward([bad], "cross_entropy").result()


FORMS: dict[str, Callable[[np.ndarray], object]] = {
    "torch": torch.from_numpy,
    "list": np.ndarray.tolist,
    "float64 or int32": lambda array: array.astype(np.int32 if array.dtype.kind == "i" else np.float64),
    "read-only": lambda array: np.frombuffer(array.tobytes(), dtype=array.dtype),
    "every other element": lambda array: np.repeat(array, 2)[::2],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_arrays_of_any_kind_give_the_same_result(training: TrainingClient, loss_fn: str, form: str) -> None:
    arrays = {key: tensor.to_numpy() for key, tensor in cross_entropy_datum(N, 3).loss_fn_inputs.items()}
    if loss_fn == "gspo":
        arrays["advantages"] = arrays.pop("weights")
        arrays["logprobs"] = np.full(N, -7, dtype=np.float32)
        arrays["sequence_ratio_mask"] = np.ones(N, dtype=np.float32)
    converted: dict = {key: FORMS[form](array) for key, array in arrays.items()}
    other = tinker.Datum(model_input=prompt(TOKENS), loss_fn_inputs=converted)
    assert_same_result(training, [other], [datum(TOKENS, **arrays)], loss_fn)


def test_nested_lists_are_many_targets_per_position(training: TrainingClient) -> None:
    targets, weights = top_k(5)
    lists: dict = {"target_tokens": targets.tolist(), "weights": weights.tolist()}
    nested = tinker.Datum(model_input=prompt(TOKENS), loss_fn_inputs=lists)
    assert_same_result(training, [nested], [datum(TOKENS, target_tokens=targets, weights=weights)], "cross_entropy")


def test_bfloat16_weights_are_widened(training: TrainingClient) -> None:
    targets = torch.tensor(TOKENS)
    weights = torch.linspace(-1, 1, N).bfloat16()
    narrow = tinker.Datum(
        model_input=prompt(TOKENS),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},  # pyright: ignore[reportArgumentType]
    )
    wide = datum(TOKENS, target_tokens=targets.numpy(), weights=weights.float().numpy())
    assert_same_result(training, [narrow], [wide], "cross_entropy")
