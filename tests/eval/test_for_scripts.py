"""Evaluators, chats and uploads at the paths that scripts import."""

import asyncio
import builtins
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tinker
from tinker.types import SampledSequence

from tests.fakes import fake_logprob
from tinker_cookbook import weights
from tinker_cookbook.chat_app.tinker_chat_cli import ChatSession
from tinker_cookbook.eval import EvalStore, RunMetadata
from tinker_cookbook.eval import inspect_utils as inspect_model
from tinker_cookbook.eval.custom_evaluators import QA_DATASET, CustomEvaluator, grader_fn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.play_w_env import get_async_input
from tinker_cookbook.supervised import viz_sft_dataset
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = "example_data/tiny_chat"


class Policy:
    """Says what its replies are, in order; remembers prompts and settings."""

    def __init__(self, replies: list[str]) -> None:
        self.renderer = get_renderer("role_colon", get_tokenizer(TINY))
        self.replies, self.asked = replies, list[tuple[str, tinker.SamplingParams]]()

    def sample(self, prompt: tinker.ModelInput, num_samples: int, params: tinker.SamplingParams) -> Any:
        tokenizer = self.renderer.tokenizer
        self.asked.append((str(tokenizer.decode(prompt.to_ints())), params))
        tokens = tokenizer.encode(self.replies[len(self.asked) - 1] + "\n\nUser:", add_special_tokens=False)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        sequence = SampledSequence(
            stop_reason="stop", sequence_id="0", tokens_np=np.array(tokens), logprobs_np=np.zeros(len(tokens))
        )
        done.set_result(SimpleNamespace(sequences=[sequence]))
        return done


def test_an_evaluator_to_copy() -> None:
    policy = Policy(["It is PARIS.", "Bonn", "rome"])
    evaluator = CustomEvaluator(QA_DATASET, grader_fn, TINY, "role_colon")
    assert asyncio.run(evaluator(policy)) == {"accuracy": 2 / 3}  # pyright: ignore[reportArgumentType]
    assert "capital of Germany?" in policy.asked[1][0] and policy.asked[0][1].max_tokens == 100
    assert asyncio.run(CustomEvaluator([], grader_fn, TINY, "role_colon")(policy)) == {"accuracy": 0.0}  # pyright: ignore[reportArgumentType]


def datum(tokens: list[int], weights: list[float]) -> tinker.Datum:
    fields = {"target_tokens": np.array(tokens[1:]), "weights": np.array(weights, dtype=np.float32)}
    tensors = {key: tinker.TensorData.from_numpy(value) for key, value in fields.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


DATA = [datum([5, 6, 7, 8], [0, 1, 1]), datum([9, 4], [2])]


class Scorer:
    """Gives each token a logprob of its own, so that a shift by one shows."""

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result([None, *(fake_logprob(token) for token in prompt.to_ints()[1:])])
        return done

    def forward(self, data: list[tinker.Datum], loss_fn: str) -> Any:
        def targets(one: tinker.Datum) -> Any:
            logprobs = [fake_logprob(token) for token in one.loss_fn_inputs["target_tokens"].tolist()]
            return {"logprobs": tinker.TensorData.from_numpy(np.array(logprobs, dtype=np.float32))}

        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(SimpleNamespace(loss_fn_outputs=[targets(one) for one in data]))
        return done


def test_held_out_loss_is_the_same_by_a_snapshot_and_by_a_forward_pass() -> None:
    class Batches(SupervisedDataset):
        def get_batch(self, index: int) -> list[tinker.Datum]:
            return [DATA[index]]

        def __len__(self) -> int:
            return len(DATA)

    expected = -(fake_logprob(7) + fake_logprob(8) + 2 * fake_logprob(4)) / 4
    for kind in (SamplerNLLEvaluator, NLLEvaluator):
        evaluator = kind.from_dataset(Batches(), name="held_out")
        with pytest.warns(DeprecationWarning) if kind is NLLEvaluator else pytest.MonkeyPatch.context():
            metrics = asyncio.run(evaluator(Scorer()))  # pyright: ignore[reportArgumentType]
        assert metrics == {"held_out/nll": pytest.approx(expected, rel=1e-6)}
    with_bytes = SamplerNLLEvaluator(DATA, tokenizer=get_tokenizer(TINY))
    metrics = asyncio.run(with_bytes(Scorer()))  # pyright: ignore[reportArgumentType]
    assert metrics.keys() == {"test/nll", "test/bpb"} and metrics["test/bpb"] > 0 and math.isfinite(metrics["test/bpb"])


def test_a_chat_remembers_what_was_said() -> None:
    policy = Policy(["four", "eight"])
    session = ChatSession(policy, policy.renderer, max_tokens=9, temperature=0.5, top_p=0.75)  # pyright: ignore[reportArgumentType]

    async def talk() -> list[str]:
        shown = []
        for line in ("2 + 2?", "and 4 + 4?"):
            session.add_user_message(line)
            shown.append(await session.generate_response())
        return shown

    assert asyncio.run(talk()) == ["four", "eight"]
    assert "2 + 2?" in policy.asked[1][0] and "four" in policy.asked[1][0]
    assert (policy.asked[0][1].max_tokens, policy.asked[0][1].temperature, policy.asked[0][1].top_p) == (9, 0.5, 0.75)
    session.clear_history()
    assert session.conversation_history == []


def test_what_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two", "", "three"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    assert asyncio.run(get_async_input("> ", multiline=True)) == "one\ntwo"
    assert asyncio.run(get_async_input("> ")) == "three"


def test_a_dataset_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_see.py").write_text(
        "import tinker_cookbook.supervised.data as data\n"
        f"def Mine(common_config):\n    return data.FromConversationFileBuilder(common_config=common_config, "
        f"file_path={str(tmp_path / 'rows.jsonl')!r})\n"
    )
    row = '{"messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]}\n'
    (tmp_path / "rows.jsonl").write_text(row)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "input", lambda prompt: "")
    config = viz_sft_dataset.Config(model_name=TINY, dataset_path="mine_to_see:Mine", renderer_name="role_colon")
    viz_sft_dataset.run(config)
    shown = capsys.readouterr().out
    assert "\033[33m" in shown and "\033[32m" in shown and shown.index("2 + 2") < shown.index("\033[32m")
    for path, said in (("nowhere_at_all:Mine", "No module"), ("json:dumps", "")):
        with pytest.raises((ConfigurationError, TypeError), match=said):
            viz_sft_dataset.run(viz_sft_dataset.Config(model_name=TINY, dataset_path=path, renderer_name="role_colon"))


def test_a_folder_is_uploaded_with_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    class Hub:
        endpoint = "https://hub.test"

        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, **options: Any) -> None:
            calls.append(options)

        def upload_folder(self, **options: Any) -> None:
            calls.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    (tmp_path / "adapter_config.json").write_text("{}")
    card = weights.ModelCardConfig("a/base", license="mit")
    for _ in range(2):
        url = weights.publish_to_hf_hub(model_path=str(tmp_path), repo_id="me/m", token="t", model_card=card)
        assert url == "https://hub.test/me/m"
    assert "license: mit" in (tmp_path / "README.md").read_text() and "is kept" in caplog.text
    made = {"repo_id": "me/m", "repo_type": "model", "private": True, "exist_ok": True}
    assert calls[:3] == ["t", made, {"folder_path": str(tmp_path), "repo_id": "me/m", "repo_type": "model"}]
    with pytest.raises(FileNotFoundError, match="no such folder"):
        weights.publish_to_hf_hub(model_path=str(tmp_path / "none"), repo_id="me/m")


def test_names_of_the_package_and_of_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EvalStore.__module__ == RunMetadata.__module__ == "tinker_cookbook.stores.eval_store"
    usage = SimpleNamespace(model=SimpleNamespace(ModelUsage=dict))
    monkeypatch.setattr(inspect_model, "require_inspect", lambda: usage)
    responses: Any = [SimpleNamespace(tokens=[1, 2, 3]), SimpleNamespace(tokens=[4])]
    found = inspect_model.get_model_usage([7, 8], responses)
    assert found == {"input_tokens": 2, "output_tokens": 4, "total_tokens": 6}
    with pytest.raises(ConfigurationError, match="model_path=None"):
        inspect_model.InspectAPIFromTinkerSampling("role_colon", TINY)
