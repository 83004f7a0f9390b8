"""freeze_data: what a call trains on is what its arguments were when it was made."""

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import prompt, random_tokens
from tinker_local_backend import RequestError
from tinker_local_backend.engine.training.datums import OwnedData, freeze_data

N = 5
TOKENS = random_tokens(N, 0)


def make(**inputs: object) -> tinker.Datum:
    given: dict = inputs
    return tinker.Datum(model_input=prompt(TOKENS), loss_fn_inputs=given)


def test_a_buffer_may_be_reused_after_the_call() -> None:
    targets, weights = np.arange(N), np.ones(N, dtype=np.float32)
    original = make(target_tokens=targets, weights=weights)
    (frozen,) = freeze_data([original])
    targets[:] = 9
    weights[:] = 9
    assert original.loss_fn_inputs["weights"].data == [9.0] * N  # the SDK does not copy
    assert frozen.loss_fn_inputs["target_tokens"].data == list(range(N))
    assert frozen.loss_fn_inputs["weights"].data == [1.0] * N
    for tensor, dtype in (
        (frozen.loss_fn_inputs["target_tokens"], "int64"),
        (frozen.loss_fn_inputs["weights"], "float32"),
    ):
        assert tensor.dtype == dtype and tensor.shape == [N]


def test_a_torch_tensor_may_be_changed_in_place_after_the_call() -> None:
    weights = torch.ones(N)
    (frozen,) = freeze_data([make(target_tokens=np.arange(N), weights=weights)])
    weights.zero_()
    assert frozen.loss_fn_inputs["weights"].data == [1.0] * N


def test_a_sparse_tensor_and_its_indices_may_be_changed_after_the_call() -> None:
    dense = torch.zeros(N, 9)
    dense[0, 3], dense[4, 8] = 2.0, -1.0
    tensor = tinker.TensorData.from_torch_sparse(dense)
    assert tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None and tensor.shape is not None
    (frozen,) = freeze_data([make(weights=tensor)])
    tensor._numpy[:] = 7
    tensor.sparse_col_indices[0] = 1
    tensor.sparse_crow_indices[1] = 0
    tensor.shape[1] = 10
    np.testing.assert_array_equal(frozen.loss_fn_inputs["weights"].to_numpy(), dense.numpy())
    assert frozen.loss_fn_inputs["weights"].sparse_crow_indices is not None  # still small


def test_tokens_and_the_dict_of_inputs_may_be_changed_after_the_call() -> None:
    tokens = list(TOKENS)
    chunk = tinker.EncodedTextChunk.model_construct(tokens=tokens, type="encoded_text")
    model_input = tinker.ModelInput.model_construct(chunks=[chunk])
    original = tinker.Datum(model_input=model_input, loss_fn_inputs=make(weights=[1.0] * N).loss_fn_inputs)
    (frozen,) = freeze_data([original])
    tokens[0] = 0
    model_input.chunks.append(chunk)
    original.loss_fn_inputs.clear()
    assert original.model_input.to_ints() != TOKENS
    assert frozen.model_input.to_ints() == TOKENS
    assert list(frozen.loss_fn_inputs) == ["weights"]


def test_the_list_of_data_may_be_changed_after_the_call() -> None:
    data = [make(weights=[1.0] * N), make(weights=[2.0] * N)]
    frozen = freeze_data(data)
    data.pop()
    assert [datum.loss_fn_inputs["weights"].data[0] for datum in frozen] == [1.0, 2.0]


def test_what_cannot_be_trained_on_is_left_to_the_check_that_names_it() -> None:
    """Images, empty chunks, inconsistent tensors: freezing neither fixes nor refuses them."""
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    model_input = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[]), image])
    broken = tinker.TensorData(data=[1.0], dtype="float32", sparse_crow_indices=[0, 9])
    (frozen,) = freeze_data([tinker.Datum(model_input=model_input, loss_fn_inputs={"weights": broken})])
    assert frozen.model_input.chunks[1] == image and frozen.model_input.chunks[0].length == 0
    tensor = frozen.loss_fn_inputs["weights"]
    assert tensor.sparse_crow_indices == [0, 9] and tensor.sparse_col_indices is None and tensor.shape is None


def test_provenance_stays() -> None:
    spans: tinker.types.ProvenanceSpans = [tinker.types.PromptProvenanceSpan(length=N, sequence_id="s")]
    datum = make(target_tokens=np.arange(N)).with_provenance(model_input=spans, loss_fn_inputs=spans)
    (frozen,) = freeze_data([datum])
    assert frozen.model_input_spans == spans and frozen.loss_fn_input_spans == spans


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make(), r"data must be a list of tinker\.Datum, got Datum"),
        (None, "got NoneType"),
        ([make(), {"model_input": 1}], r"data\[1\] is a dict; give a tinker\.Datum"),
    ],
)
def test_what_is_no_datum_is_refused(data: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        freeze_data(data)  # pyright: ignore[reportArgumentType]


def test_what_nobody_else_holds_is_not_copied() -> None:
    data = OwnedData([make(target_tokens=np.arange(N))])
    assert freeze_data(data) is data
    (copied,) = freeze_data(list(data))
    assert copied is not data[0]
