"""The shipped tiny model is what tests and demos count on, and making it twice gives the same thing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.utils.files import read_jsonl
from tools.make_tiny_model import corpus
from tools.make_tiny_model.data_files import write_all
from tools.make_tiny_model.figures import measure
from tools.make_tiny_model.folder import check_replaceable, write_folder
from tools.make_tiny_model.tokenizer import RESERVED, SPECIALS, train_tokenizer
from tools.make_tiny_model.train import Schedule, Shape, encode, new_model, train

TINY = EXAMPLE_DATA / "tiny_chat"
DATA_FILES = (
    "qa/arithmetic_train.jsonl", "qa/arithmetic_test.jsonl", "qa/test.jsonl", "qa/test_held_out.jsonl",
    "summary/articles_train.jsonl", "summary/articles_test.jsonl", "conversations.jsonl", "comparisons.jsonl",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return measure(TINY, seed=0, samples=2)


# Slow: many hundred replies through `generate`. What recipes learn from this model is tested everywhere.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("stop_rate", 0.98, 1.0),
        ("arithmetic_accuracy_train", 0.30, 0.60),
        ("arithmetic_accuracy_test", 0.30, 0.60),
        ("arithmetic_greedy_accuracy_train", 0.85, 1.0),
        ("arithmetic_greedy_accuracy_test", 0.85, 1.0),
        ("tag_rate", 0.95, 1.0),
        ("confidence_rate", 0.95, 1.0),
        ("summary_rouge_l", 0.30, 0.9),
        ("summary_tag_rate", 0.95, 1.0),
        ("debate_speech_rate", 0.95, 1.0),
        ("verdict_rate", 0.95, 1.0),
        ("judge_first_seat_rate", 0.4, 0.6),
    ],
)
def test_shipped_model_behaves(figures: dict[str, float], name: str, low: float, high: float) -> None:
    assert low <= figures[name] <= high


def test_folder_is_small_and_stored_in_bfloat16() -> None:
    assert sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file()) <= 8 * 2**20
    weights = load_file(TINY / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert 1e6 <= sum(w.numel() for w in weights.values()) <= 4e6


def test_generation_stops_at_both_stops(tokenizer) -> None:
    settings = json.loads((TINY / "generation_config.json").read_text())
    assert settings["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert settings["do_sample"] is True and settings["temperature"] == 1.0


def test_every_special_is_one_token(tokenizer) -> None:
    assert tokenizer.is_fast
    assert len(RESERVED) == 16
    ids = [tokenizer.encode(special) for special in SPECIALS]
    assert all(len(i) == 1 for i in ids)
    assert len({i[0] for i in ids}) == len(SPECIALS)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>", None)


@pytest.mark.parametrize("text", ["", "What is 12 + 9?", "  two\n\n lines <SOLUTION>7</SOLUTION> <b", "naïve, 漢字 🙂"])
def test_encoding_adds_nothing_and_loses_nothing(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_one_by_one(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2048")) == ["2", "0", "4", "8"]


def test_chat_template_is_chatml(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "tool", "content": "12"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    only_user = tokenizer.apply_chat_template(messages[1:2], tokenize=False)
    assert only_user == "<|im_start|>user\nHi.<|im_end|>\n"


def test_training_text_has_the_tokens_of_the_chat_template(tokenizer) -> None:
    """A prompt and a reply are tokenized apart when sampling: training must have seen the same ids."""
    talks = [turns for turns in corpus.generate(corpus.STAGES[-1], 200, seed=3) if turns[0][0] in ("system", "user")]
    assert len(talks) > 100
    for turns in talks:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        (encoded,) = encode([turns], tokenizer)
        assert encoded.ids == tokenizer.encode(text + "<|endoftext|>")


def test_data_files_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    write_all(tmp_path)
    for name in DATA_FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLE_DATA / name).read_bytes(), name


def test_data_files_hold_what_they_promise() -> None:
    train_rows, test_rows, few = (read_jsonl(EXAMPLE_DATA / name) for name in DATA_FILES[:3])
    assert (len(train_rows), len(test_rows), len(few)) == (300, 100, 8)
    assert not {r["question"] for r in train_rows} & {r["question"] for r in test_rows}
    assert {"question": "What is 7 + 5?", "answer": "12"} in few
    news = [row for name in DATA_FILES[4:6] for row in read_jsonl(EXAMPLE_DATA / name)]
    assert len({row["article"] for row in news}) == 64
    assert all(60 <= len(row["article"].split()) <= 110 for row in news)
    conversations = [json.dumps(row) for row in read_jsonl(EXAMPLE_DATA / "conversations.jsonl")]
    assert len(conversations) == len(set(conversations)) == 128
    library = [json.dumps(row) for row in read_jsonl(EXAMPLE_DATA / "library.jsonl")]
    assert len(library) == len(set(library)) == 64


def test_corpus_depends_on_its_seed_only() -> None:
    assert corpus.stages(200, seed=5) == corpus.stages(200, seed=5)
    assert corpus.stages(200, seed=5) != corpus.stages(200, seed=6)


def test_slips_never_rival_the_right_answer() -> None:
    from tools.make_tiny_model.arithmetic import POOL, slips

    right_rate = corpus.STAGES[-1].right_rate
    for item in (item for items in POOL.values() for item in items):
        weights = slips(item)
        assert item.answer not in weights
        assert max(weights.values()) / sum(weights.values()) * (1 - right_rate) < 0.5 * right_rate


def test_training_twice_gives_the_same_weights() -> None:
    def once() -> dict[str, torch.Tensor]:
        stages = corpus.stages(60, seed=1)
        tokenizer = train_tokenizer((corpus.plain_text(turns) for turns in stages[-1]), 500)
        model = new_model(Shape(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=64), tokenizer, seed=1)
        schedule = Schedule(batch_tokens=512, max_steps=3)
        train(model, [encode(turns, tokenizer) for turns in stages], schedule, seed=1, report=lambda _: None)
        return model.state_dict()

    first, second = once(), once()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_folder_is_written_whole_or_not_at_all(tokenizer, tmp_path: Path) -> None:
    model = new_model(Shape(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=64), tokenizer, seed=0)
    out = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), write_folder(model, tokenizer, out):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with write_folder(model, tokenizer, out):
        pass
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.float())
    assert list(tmp_path.iterdir()) == [out]


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a model folder"):
        check_replaceable(tmp_path)
