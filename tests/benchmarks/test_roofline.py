"""The arithmetic of upper bounds: what a step is counted to move and compute, and how long that takes."""

import pytest

from benchmarks.gpu.decoding import Cell
from benchmarks.models import SHAPES
from benchmarks.roofline import Card, Operator, decode_steps, decoding_speed, training_operations

CARD = Card("round", 1 << 40, 1e12, 1e14)


def test_an_operator_takes_the_longest_of_its_bytes_its_operations_and_its_launches() -> None:
    assert CARD.seconds(Operator("a", 3, 100)) == 6e-6
    assert CARD.seconds(Operator("a", 1, 5_000_000, 100)) == 5e-6
    assert CARD.seconds(Operator("a", 1, 100, 10**9)) == 1e-5


def test_a_speed_and_its_share_of_the_bandwidth() -> None:
    step = {Operator("a", 1, 5 * 10**9): 2, Operator("b", 1, 0): 500}
    assert decoding_speed(CARD, step, Cell(22, 1024, 1), 5.5e9) == "2,000 (50%)"
    assert decoding_speed(Card("small", 5 * 10**9, 1e12, 1e14), step, Cell(22, 1024, 1), 5.5e9) == "-"


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_counted_step_computes_every_product_and_reads_every_weight_key_and_adapter(name: str) -> None:
    shape, rows, rank = SHAPES[name], 4, 32
    ((cell, step),) = zip([Cell(rows, 64, 2)], decode_steps(name, [Cell(rows, 64, 2)]), strict=True)
    products = {operator: count for operator, count in step.items() if operator.operations}
    assert sum(o.operations * count for o, count in products.items()) == 2 * rows * shape.parameters
    weights = 2 * shape.parameters
    moved = sum(o.bytes * count for o, count in products.items())
    assert weights < moved < weights + 32 * rows * (shape.vocab + shape.layers * (2 * shape.mlp + 8 * shape.hidden))
    attention = {o: count for o, count in step.items() if o.name == "paged_attention"}
    assert sum(attention.values()) == shape.layers and {o.launches for o in attention} == {2}
    heads = 2 * 2 * rows * shape.heads * shape.head_dim  # queries and results
    assert {o.bytes for o in attention} == {heads + rows * cell.context * shape.kv_bytes_per_token(2) // shape.layers}
    of_adapters = sum(o.bytes * count for o, count in step.items() if o.name == "lora_add")
    assert of_adapters > cell.adapters * (2 * shape.adapter_parameters(rank) + 4 * rank * (shape.hidden + shape.vocab))


def test_training_counts_frozen_weights_adapters_and_attention() -> None:
    shape = SHAPES["tiny"]
    # A layer: q 128, k and v 64 wide, from 64; o back; three of the MLP with 192. The head: 512 tokens.
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 192
    adapters = 32 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 192))
    frozen, every = training_operations(shape, 100)
    assert frozen == 4 * (2 * layer + 64 * 512)
    assert every == frozen + 2 * (6 * adapters + 7 * 128 * 100)
