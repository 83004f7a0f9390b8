"""Token completers over the fakes, message completers over a real snapshot, and tasks of one's own by name."""

import asyncio

import pytest
import tinker

from tests.fakes import FakeServiceClient, SampleCall
from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.tasks import registry
from tinker_cookbook.tasks.prompts import QA_SYSTEM
from tinker_cookbook.tasks.qa import QATask
from tinker_cookbook.tasks.types import parse_solution
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")


class TestTokenCompleter:
    def completer(self, service: FakeServiceClient, **options) -> TinkerTokenCompleter:
        return TinkerTokenCompleter(service.new_sampler(0), 4, **options)

    @pytest.mark.parametrize(
        ("asked", "prompt", "expected"),
        [
            (None, 1, 4),  # its own max_tokens
            (5, 1, 4),  # a call cannot ask for more
            (3, 1, 3),
            (3, 8, 2),  # what is left of the window
            (1, 8, 1),
        ],
    )
    def test_the_least_of_its_own_limit_the_call_s_and_what_the_window_leaves(
        self, asked: int | None, prompt: int, expected: int
    ) -> None:
        service = FakeServiceClient()
        policy = self.completer(service, context_window=10)
        asyncio.run(policy(tinker.ModelInput.from_ints([1] * prompt), [7], max_tokens=asked))
        assert [call.params.max_tokens for call in service.sampled] == [expected]

    def test_temperature_and_stop_reach_the_sampler(self) -> None:
        service = FakeServiceClient()
        asyncio.run(self.completer(service, temperature=0.5)(tinker.ModelInput.from_ints([1]), [7]))
        (call,) = service.sampled
        assert call.params.temperature == 0.5 and call.params.stop == [7]

    def test_a_prompt_that_fills_the_window_is_refused(self) -> None:
        policy = self.completer(FakeServiceClient(), context_window=3)
        with pytest.raises(ConfigurationError, match="3 tokens leaves no room in context_window=3"):
            asyncio.run(policy(tinker.ModelInput.from_ints([1, 2, 3]), [7]))

    def test_a_sampler_without_a_logprob_for_each_token_is_refused(self) -> None:
        service = FakeServiceClient()
        sampler = service.new_sampler(0)

        class Careless:
            def __getattr__(self, name: str):
                return getattr(sampler, name)

            async def sample(self, prompt, num_samples, sampling_params):
                response = await sampler.sample(prompt, num_samples, sampling_params)
                sequence = response.sequences[0]
                short = tinker.SampledSequence("stop", "0", tokens_np=sequence.tokens_np)
                return tinker.SampleResponse(sequences=[short])

        policy = TinkerTokenCompleter(Careless(), 4)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DataValidationError, match="1 tokens and no logprobs"):
            asyncio.run(policy(tinker.ModelInput.from_ints([1]), [7]))

    def test_replies_depend_on_the_prompt_seed_and_weights_of_the_snapshot(self) -> None:
        def reply(call: SampleCall) -> list[int]:
            return [call.weights, *call.prompt]

        service = FakeServiceClient(reply)
        policy = TinkerTokenCompleter(service.new_sampler(3), 4)
        assert asyncio.run(policy(tinker.ModelInput.from_ints([5]), [7])).tokens == [3, 5]


def test_a_message_completer_answers_with_the_text_and_without_the_stop() -> None:
    async def ask() -> str:
        client = await backends.create_service_client("local").create_sampling_client(base_model=TINY)
        renderer = get_renderer("qwen3_instruct", get_tokenizer(TINY))
        completer = TinkerMessageCompleter(client, renderer, max_tokens=32, temperature=0.1)
        reply = await completer(
            [{"role": "system", "content": QA_SYSTEM}, {"role": "user", "content": "What is 2 + 2?"}]
        )
        assert reply["role"] == "assistant"
        return get_text_content(reply)

    text = asyncio.run(ask())
    assert parse_solution(text) is not None and "<|im_end|>" not in text


def test_a_task_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Riddles(QATask):
        name = "riddles"

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    with pytest.raises(ConfigurationError, match="task='riddles' is unknown"):
        registry.get_task("riddles")
    registry.register_task(Riddles)
    assert isinstance(registry.get_task("riddles"), Riddles)
