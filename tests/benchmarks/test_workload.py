"""Every contender gets the same work, and the same work again tomorrow."""

import pytest

from benchmarks.models import EOS_ID, SHAPES, ensure_model, word_tokenizer, words
from benchmarks.rates import decode_bytes, training_flops
from benchmarks.workload import (
    GROUP_SIZE,
    PROMPT_LENGTHS,
    TrainingSequence,
    even_fraction,
    make_workload,
    preference_pairs,
    training_sequences,
)


def test_same_arguments_same_work() -> None:
    assert make_workload(512) == make_workload(512)
    assert make_workload(512) != make_workload(512, seed=1)
    assert training_sequences(make_workload(512)) == training_sequences(make_workload(512))
    assert preference_pairs(make_workload(512)) == preference_pairs(make_workload(512))


def test_prompts_are_ragged_and_hold_no_stop_token() -> None:
    workload = make_workload(8192)
    assert tuple(map(len, workload.prompts_P)) == PROMPT_LENGTHS
    assert len(workload.stops) == round(8192 / 80) and EOS_ID in workload.stops
    assert not set(workload.stops) & {token for prompt in workload.prompts_P for token in prompt}


def test_distinct_prompts_change_the_prompts_and_nothing_else() -> None:
    workload = make_workload(8192)
    shared, distinct = training_sequences(workload, True), training_sequences(workload, False)
    assert [len(s.tokens) for s in shared] == [len(s.tokens) for s in distinct]
    assert [s.completion for s in shared] == [s.completion for s in distinct]
    prompts = [{tuple(s.tokens[: s.prompt_length]) for s in sequences} for sequences in (shared, distinct)]
    assert [len(p) for p in prompts] == [len(PROMPT_LENGTHS), len(PROMPT_LENGTHS) * GROUP_SIZE]


def test_completions_have_the_lengths_asked_for() -> None:
    workload = make_workload(512, max_new_tokens=6)
    lengths = [len(s.completion) for s in training_sequences(workload)]
    assert min(lengths) >= 1 and max(lengths) == 6
    assert all(pair.chosen[-1] == EOS_ID and len(pair.chosen) <= 6 for pair in preference_pairs(workload))


def test_text_and_tokens_translate_exactly() -> None:
    tokenizer = word_tokenizer(512)
    tokens = make_workload(512).prompts_P[0]
    assert tokenizer(words(tokens))["input_ids"] == tokens
    assert tokenizer(f"{words(tokens)} {words(tokens)}")["input_ids"] == [*tokens, *tokens]
    assert tokenizer(f"{words(tokens)}<eos>")["input_ids"] == [*tokens, EOS_ID]  # as TRL ends a text


def test_a_model_is_made_once(tmp_path) -> None:
    folder = ensure_model("tiny", SHAPES["tiny"], str(tmp_path))
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert ensure_model("tiny", SHAPES["tiny"], str(tmp_path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_parameters_of_the_public_shapes() -> None:
    shape = SHAPES["qwen3-4b"]
    # 36 x (attention 2 * 2560 * 4096 + 2 * 2560 * 1024, MLP 3 * 2560 * 9728), and the tied head 2560 * 151936.
    assert shape.body_parameters == 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert shape.body_parameters + shape.head_parameters == pytest.approx(4.02e9, rel=0.01)


def test_flops_and_bytes_of_a_case_done_by_hand() -> None:
    shape = SHAPES["tiny"]
    body = 2 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 192)
    adapter = 2 * 4 * ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 3 * (64 + 192))
    assert (shape.body_parameters, shape.adapter_parameters(4)) == (body, adapter)
    one = TrainingSequence(list(range(3, 14)), prompt_length=7)  # 10 positions, 4 targets
    attention = 6 * 100 * 4 * 32 * 2
    assert training_flops(shape, 4, [one]) == (4 * body + 6 * adapter) * 10 + 4 * 64 * 512 * 4 + attention
    kv = 2 * 2 * 2 * 32 * 4
    weights = (body + 64 * 512) * 4 + adapter * 4
    assert decode_bytes(shape, 4, rows=5, prompt_length=10, new_tokens=3, bytes_per_number=4) == (
        2 * weights + 5 * (11 + 12) * kv
    )


def test_reward_counts_even_tokens() -> None:
    assert even_fraction([2, 4, 5, 8]) == 0.75
