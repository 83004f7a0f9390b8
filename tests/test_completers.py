"""Token completers over the fakes, message completers over a real snapshot, and tasks of one's own by name."""

import asyncio
import concurrent.futures
from typing import Any

import numpy as np
import pytest
import tinker

from tests.fakes import FakeServiceClient, SampleCall
from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env import tasks as registry
from tinker_cookbook.env.qa import QA_SYSTEM, QATask
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.seeds import derive_seed

TINY = str(EXAMPLE_DATA / "tiny_chat")


def test_seeds_are_the_same_on_every_machine() -> None:
    """Pinned: runs are repeated by their seeds."""
    assert [derive_seed(0), derive_seed(7, "epoch", 3), derive_seed("a")] == [1223360973, 1103370702, 919080834]
    assert max(derive_seed(i) for i in range(100)) in range(2**30, 2**31)


class Sampler:
    """Returns one sequence and notes how many it was asked for."""

    def __init__(self, tokens: list[int], logprobs: list[float] | None, stop_reason: tinker.StopReason = "stop"):
        values = None if logprobs is None else np.array(logprobs, dtype=np.float32)
        self.sequence = tinker.SampledSequence(
            stop_reason, "0", tokens_np=np.array(tokens, dtype=np.int32), logprobs_np=values
        )
        self.asked: list[int] = []

    async def sample(self, prompt, num_samples, sampling_params):
        self.asked.append(num_samples)
        return tinker.SampleResponse(sequences=[self.sequence])


def test_min_p_is_not_lost_on_the_way_to_a_hosted_client() -> None:
    """The SDK's own class drops the field, and its clients send what that class knows."""
    hosted = tinker.SamplingClient.__new__(tinker.SamplingClient)
    with pytest.raises(ConfigurationError, match=r"min_p=0\.1: the hosted service does not offer it"):
        asyncio.run(TinkerTokenCompleter(hosted, 4, min_p=0.1)(tinker.ModelInput.from_ints([1]), []))


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

    def test_a_completion_is_one_sample_with_its_logprobs_and_how_it_ended(self) -> None:
        sampler = Sampler([5, 6], [-0.5, -0.25], "length")
        policy = TinkerTokenCompleter(sampler, 4)  # pyright: ignore[reportArgumentType]
        completion = asyncio.run(policy(tinker.ModelInput.from_ints([1]), [7]))
        assert completion == TokensWithLogprobs([5, 6], [-0.5, -0.25], "length", "0") and sampler.asked == [1]

    @pytest.mark.parametrize("how", ["response", "future", "concurrent future", "sdk future", "sync"])
    def test_a_client_may_have_sample_async_alone(self, how: str) -> None:
        class AsyncOnly:
            async def sample_async(self, prompt, num_samples, sampling_params):
                response = await Sampler([5], [-0.5]).sample(prompt, num_samples, sampling_params)
                return response if how == "response" else Future(response)

        class Future:
            """What the first of two awaits gives."""

            def __init__(self, response: tinker.SampleResponse):
                self.response = response

            async def result_async(self) -> tinker.SampleResponse:
                return self.response

        class Concurrent:
            def sample(self, prompt, num_samples, sampling_params):
                done: concurrent.futures.Future[tinker.SampleResponse] = concurrent.futures.Future()
                done.set_result(tinker.SampleResponse(sequences=[Sampler([5], [-0.5]).sequence]))
                return done

        class Both(concurrent.futures.Future[tinker.SampleResponse]):
            """As the SDK returns it: to be awaited; its use as a concurrent future is deprecated."""

            def add_done_callback(self, fn):
                raise AssertionError("the SDK warns that this is deprecated")

            def __await__(self):
                yield from ()
                return self.result()

        class Sdk:
            def sample(self, prompt, num_samples, sampling_params):
                done = Both()
                done.set_result(tinker.SampleResponse(sequences=[Sampler([5], [-0.5]).sequence]))
                return done

        class Sync:
            def sample(self, prompt, num_samples, sampling_params):
                return tinker.SampleResponse(sequences=[Sampler([5], [-0.5]).sequence])

        client: Any = {"concurrent future": Concurrent, "sdk future": Sdk, "sync": Sync}.get(how, AsyncOnly)()
        completion = asyncio.run(TinkerTokenCompleter(client, 4)(tinker.ModelInput.from_ints([1]), [7]))
        assert completion == TokensWithLogprobs([5], [-0.5], "stop", sequence_id="0")

    def test_a_client_is_asked_by_the_names_of_the_sdk(self) -> None:
        class OwnOrder:
            async def sample_async(self, sampling_params, prompt, *, num_samples):
                assert (sampling_params.max_tokens, prompt.to_ints(), num_samples) == (4, [1], 1)
                return tinker.SampleResponse(sequences=[Sampler([5], [-0.5]).sequence])

        policy = TinkerTokenCompleter(OwnOrder(), 4)  # pyright: ignore[reportArgumentType]
        assert asyncio.run(policy(tinker.ModelInput.from_ints([1]), [7])).tokens == [5]

    def test_a_client_that_cannot_sample_is_named(self) -> None:
        client: Any = object()
        with pytest.raises(ConfigurationError, match="sampling_client object has neither sample nor sample_async"):
            asyncio.run(TinkerTokenCompleter(client, 4)(tinker.ModelInput.from_ints([1]), [7]))

    @pytest.mark.parametrize(("logprobs", "number"), [(None, "no"), ([-0.5, -0.5], "2")])
    def test_a_sampler_without_a_logprob_for_each_token_is_refused(
        self, logprobs: list[float] | None, number: str
    ) -> None:
        policy = TinkerTokenCompleter(Sampler([5], logprobs), 4)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DataValidationError, match=f"1 tokens and {number} logprobs; each token needs one"):
            asyncio.run(policy(tinker.ModelInput.from_ints([1]), [7]))

    def seeds(self, policy: TinkerTokenCompleter, service: FakeServiceClient) -> list[int | None]:
        start = len(service.sampled)
        for _ in range(3):
            asyncio.run(policy(tinker.ModelInput.from_ints([1]), [7]))
        return [call.params.seed for call in service.sampled[start:]]

    def test_each_call_has_its_own_seed_and_without_one_none_is_sent(self) -> None:
        service = FakeServiceClient()
        assert self.seeds(self.completer(service, seed=5), service) == [derive_seed(5, i) for i in range(3)]
        assert self.seeds(self.completer(service), service) == [None] * 3

    def test_a_fork_has_a_seed_of_its_own_and_counts_its_own_calls(self) -> None:
        service = FakeServiceClient()
        policy = self.completer(service, seed=5, temperature=0.5, context_window=9)
        self.seeds(policy, service)
        forked = policy.fork("group", 2)
        assert self.seeds(forked, service) == [derive_seed(derive_seed(5, "group", 2), i) for i in range(3)]
        assert (forked.temperature, forked.context_window, forked.max_tokens) == (0.5, 9, 4)
        unseeded = self.completer(service)
        assert unseeded.fork("group", 2) is unseeded

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


@pytest.mark.parametrize("stop", [None, [7], []])
def test_a_message_completer_asks_as_it_was_told(stop: list[int] | None) -> None:
    service, renderer = FakeServiceClient(), get_renderer("qwen3_instruct", get_tokenizer(TINY))
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    asyncio.run(TinkerMessageCompleter(service.new_sampler(0), renderer, 9, stop)(messages))
    asyncio.run(TinkerMessageCompleter(service.new_sampler(0), renderer, 9, stop, temperature=0.5)(messages))
    assert [call.prompt for call in service.sampled] == [renderer.build_generation_prompt(messages).to_ints()] * 2
    assert [call.params.temperature for call in service.sampled] == [1.0, 0.5]
    for call in service.sampled:
        assert call.params.max_tokens == 9 and call.params.seed is None
        assert call.params.stop == (renderer.get_stop_sequences() if stop is None else stop)


def test_a_task_of_ones_own_is_found_by_its_name() -> None:
    class Riddles(QATask):
        name = "riddles"

    with pytest.raises(ConfigurationError, match="task='riddles' is unknown"):
        registry.get_task("riddles")
    registry.register_task(Riddles)
    try:
        assert isinstance(registry.get_task("riddles"), Riddles)
    finally:
        registry.unregister_task("riddles")


def test_a_message_completer_with_a_seed_draws_as_a_token_completer_does() -> None:
    service, renderer = FakeServiceClient(), get_renderer("qwen3_instruct", get_tokenizer(TINY))
    messages: list[Message] = [{"role": "user", "content": "Hello"}]

    async def ask_twice(completer: TinkerMessageCompleter) -> None:
        await completer(messages)
        await completer(messages)

    for seed in (5, 5, None):
        asyncio.run(ask_twice(TinkerMessageCompleter(service.new_sampler(0), renderer, 9, seed=seed)))
    seeds = [call.params.seed for call in service.sampled]
    assert seeds[:2] == seeds[2:4] and seeds[0] != seeds[1] and None not in seeds[:4]
    assert seeds[4:] == [None, None]
