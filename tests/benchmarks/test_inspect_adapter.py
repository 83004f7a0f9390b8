"""What must hold of inspect tasks on our policies: replies, tool calls, logprobs and counts arrive as they were sampled."""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import eval_inspect
from tests.fakes import FakeServiceClient, SampleCall, fake_logprob
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.eval import inspect_evaluators as inspect_adapter
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, run_benchmarks, task_benchmark
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights_config import Policy, WeightsConfig

run_inspect_evals = importlib.import_module("tinker_cookbook.eval.run_inspect_evals")
TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(TINY)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=TINY)
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call>'


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai.model", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'inspect-ai>="):
        inspect_adapter.task_of_items("qa/arithmetic")
    with pytest.raises(SystemExit):
        run_recipe(eval_inspect.CLIConfig, eval_inspect.main, argv=[])


def test_what_is_evaluated_must_be_named() -> None:
    config = run_inspect_evals.Config(tasks="qa/test")
    with pytest.raises(ConfigurationError, match=r"model_name: no weights are named|inspect-ai is not installed"):
        asyncio.run(run_inspect_evals.main(config))
    with pytest.raises(ConfigurationError, match="model_name=None: name the base model"):
        inspect_adapter.InspectEvaluatorBuilder(tasks="qa/test")()


def policy_that_says(*replies: str, context: int | None = 1000) -> tuple[Policy, FakeServiceClient]:
    """A policy whose n-th reply is the n-th text, the last one again and again."""
    service = FakeServiceClient()

    def reply(call: SampleCall) -> list[int]:
        text = replies[min(len(service.sampled), len(replies)) - 1]
        return [*TOKENIZER.encode(text, add_special_tokens=False), RENDERER.get_stop_sequences()[0]]  # type: ignore[list-item]

    service.reply = reply
    return Policy("fake", service.new_sampler(0), RENDERER, "qwen3_instruct", TINY, context), service


class TestModel:
    @pytest.fixture(autouse=True)
    def needs_inspect(self) -> None:
        pytest.importorskip("inspect_ai")

    def generate(self, policy: Policy, messages: Any, max_tokens: int = 16, tools: Any = (), **config: Any) -> Any:
        model = inspect_adapter.inspect_model(policy, max_tokens)
        settings = inspect_adapter.require_inspect().model.GenerateConfig(**config)
        return asyncio.run(model.api.generate(messages, list(tools), config.pop("choice", "auto"), settings))

    def test_reply_logprobs_and_counts(self) -> None:
        inspect = inspect_adapter.require_inspect()
        policy, service = policy_that_says("Hello")
        messages = [inspect.model.ChatMessageSystem(content="Be brief."), inspect.model.ChatMessageUser(content="Hi")]
        output = self.generate(policy, messages, logprobs=True, temperature=0.5, top_p=0.9, seed=3, num_choices=2)
        assert [choice.message.text for choice in output.choices] == ["Hello", "Hello"]
        assert output.stop_reason == "stop"
        sampled = service.sampled[0]
        expected = RENDERER.build_generation_prompt(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        )
        assert sampled.prompt == expected.to_ints()
        params = sampled.params
        assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 3, 16)
        tokens = service.reply(sampled)
        logprobs = output.choices[0].logprobs.content
        assert [entry.logprob for entry in logprobs] == [fake_logprob(token) for token in tokens]
        assert "".join(entry.token for entry in logprobs) == TOKENIZER.decode(tokens)
        usage = output.usage
        assert (usage.input_tokens, usage.output_tokens) == (expected.length, 2 * len(tokens))

    def test_a_prompt_that_fills_the_context(self) -> None:
        user = inspect_adapter.require_inspect().model.ChatMessageUser(content="Hi " * 30)
        policy, service = policy_that_says("Hello", context=20)
        assert self.generate(policy, [user]).stop_reason == "model_length" and not service.sampled

    @pytest.mark.parametrize(
        ("config", "message"),
        [({"frequency_penalty": 0.5}, "frequency_penalty=0.5"), ({"stop_seqs": ["x"]}, "stop_seqs")],
    )
    def test_settings_that_cannot_be_followed_are_refused(self, config: dict[str, Any], message: str) -> None:
        user = inspect_adapter.require_inspect().model.ChatMessageUser(content="Hi")
        with pytest.raises(ConfigurationError, match=message):
            self.generate(policy_that_says("Hello")[0], [user], **config)

    def test_content_other_than_text_is_refused(self) -> None:
        inspect = inspect_adapter.require_inspect()
        image = inspect.model.ChatMessageUser(content=[inspect.model.ContentImage(image="data:image/png;base64,AA==")])
        with pytest.raises(ConfigurationError, match="'image'"):
            inspect_adapter.to_messages([image])

    def test_tools_are_declared_called_and_answered(self, tmp_path: Path) -> None:
        inspect = inspect_adapter.require_inspect()
        policy, service = policy_that_says(CALL, "It is 5.")

        @inspect.tool.tool
        def add() -> Any:
            async def execute(x: int, y: int) -> int:
                """Add two numbers.

                Args:
                    x: First number to add.
                    y: Second number to add.
                """
                return x + y

            return execute

        task = inspect.ai.Task(
            dataset=[inspect.dataset.Sample(input="2 + 3?", target="5")],
            solver=[inspect.solver.use_tools(add()), inspect.solver.generate()],
            scorer=inspect.scorer.includes(),
        )
        metrics = asyncio.run(inspect_adapter.run_inspect(task, inspect_adapter.inspect_model(policy, 64), tmp_path))
        assert metrics["task/includes/accuracy"] == 1.0
        first, second = (TOKENIZER.decode(call.prompt) for call in service.sampled)
        assert "Add two numbers." in first and "5" in second[len(first) :] and '"x": 2' in second

    def test_a_broken_call_is_told_as_such(self) -> None:
        user = inspect_adapter.require_inspect().model.ChatMessageUser(content="Hi")
        broken = '<tool_call>\n{"name": "add", "arg\n</tool_call>'
        (call,) = self.generate(policy_that_says(broken)[0], [user], 64).choices[0].message.tool_calls
        assert call.parse_error

    def test_reasoning_and_tool_answers_go_through(self) -> None:
        inspect = inspect_adapter.require_inspect()
        content = [inspect.model.ContentReasoning(reasoning="hm"), inspect.model.ContentText(text="so")]
        call = inspect.tool.ToolCall(id="c1", function="add", arguments={"x": 1})
        messages = inspect_adapter.to_messages(
            [
                inspect.model.ChatMessageAssistant(content=content, tool_calls=[call]),
                inspect.model.ChatMessageTool(content="2", tool_call_id="c1", function="add"),
            ]
        )
        assert messages[0]["content"] == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
        (given,) = messages[0].get("tool_calls", [])
        assert given.function.name == "add" and json.loads(given.function.arguments) == {"x": 1}
        assert messages[1] == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


class TestTinyModel:
    @pytest.fixture(autouse=True)
    def home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("inspect_ai")
        monkeypatch.delenv("TINKER_BACKEND", raising=False)
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))

    def test_it_scores_what_the_benchmark_runner_scores(self, tmp_path: Path) -> None:
        async def both() -> tuple[float, dict[str, float]]:
            policy = await WeightsConfig(base_model=TINY).open_policy("policy")
            benchmark = task_benchmark("qa/arithmetic", policy.renderer, max_items=12)
            config = BenchmarkConfig(max_tokens=32, temperature=0.0)
            (ours,) = await run_benchmarks([benchmark], policy.sampling_client, TOKENIZER, tmp_path / "b", config, "p")
            task = inspect_adapter.task_of_items("qa/arithmetic", max_items=12)
            model = inspect_adapter.inspect_model(policy, 32, temperature=0.0)
            return ours.metrics["reward"], await inspect_adapter.run_inspect(task, model, tmp_path / "i")

        reward, metrics = asyncio.run(both())
        assert metrics["qa_arithmetic/task_reward/mean"] == pytest.approx(reward) and reward > 0

    def test_a_training_loop_can_run_it_on_the_way(self, tmp_path: Path) -> None:
        builder = inspect_adapter.InspectEvaluatorBuilder(
            model_name=TINY, renderer_name="qwen3_instruct", log_dir=str(tmp_path / "logs"), max_tokens=32, limit=6
        )

        async def evaluate() -> list[dict[str, float]]:
            trainer = await backends.create_service_client("local").create_lora_training_client(TINY, 4, seed=0)
            snapshot = await trainer.save_weights_and_get_sampling_client()
            evaluator = builder()
            return [await evaluator(snapshot) for _ in range(2)]

        first, second = asyncio.run(evaluate())
        assert first == second and set(first) == {f"inspect/qa_arithmetic/task_reward/{x}" for x in ("mean", "stderr")}
        assert len(list((tmp_path / "logs").iterdir())) == 2

    def test_the_recipe(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["limit=4", f"log_dir={tmp_path / 'logs'}"]
        run_recipe(eval_inspect.CLIConfig, eval_inspect.main, argv=argv)
        assert "qa_arithmetic/task_reward/mean" in capsys.readouterr().out

    def test_several_tasks_on_a_checkpoint_with_its_own_renderer(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def checkpoint() -> str:
            metadata = {"renderer_name": "role_colon"}
            service = backends.create_service_client("local")
            trainer = await service.create_lora_training_client(TINY, 4, seed=0, user_metadata=metadata)
            return (await trainer.save_weights_for_sampler("a")).path

        path = asyncio.run(checkpoint())
        keys = [f"model_path={path}", "tasks=qa/arithmetic,qa/test", "limit=2", f"log_dir={tmp_path / 'logs'}"]
        run_recipe(run_inspect_evals.Config, run_inspect_evals.main, argv=[*keys, "max_tokens=8"])
        printed = capsys.readouterr().out
        assert "inspect/qa_arithmetic/task_reward/mean: " in printed and "inspect/qa_test/task_reward/mean: " in printed
        assert len(list((tmp_path / "logs").iterdir())) == 2

    def test_unknown_items(self) -> None:
        with pytest.raises(ConfigurationError, match="unknown"):
            inspect_adapter.task_of_items("nothing/x")


def test_top_logprobs_become_text() -> None:
    pytest.importorskip("inspect_ai")
    sequence = SimpleNamespace(tokens=[5], logprobs=[-0.5], topk_logprobs=[[(5, -0.5), (6, -1.5)]])
    (entry,) = inspect_adapter._logprobs(RENDERER, sequence).content
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
        (TOKENIZER.decode([5]), -0.5),
        (TOKENIZER.decode([6]), -1.5),
    ]
