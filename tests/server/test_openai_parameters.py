"""Parameters of chats and completions beyond the usual ones: each changes what it names, or is refused by its name."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.server.data import ATOL
from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.server.tools_model import QUESTION
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    with (
        Serving(tmp_path_factory.mktemp("parameters-home")) as serving,
        httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HANG_SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_CHAT)


def ask(web: httpx.Client, route: str = "/v1/chat/completions", status: int = 200, **body: Any) -> Any:
    response = web.post(route, json={"model": TINY_CHAT, **body})
    assert response.status_code == status, response.text
    return response.json()


def complete(web: httpx.Client, prompt: Any = "What is seven?", **body: Any) -> list[dict[str, Any]]:
    return ask(web, "/v1/completions", prompt=prompt, return_token_ids=True, **body)["choices"]


GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_make_other_tokens_and_no_other_logprobs(web: httpx.Client, penalty: str) -> None:
    plain, changed = (complete(web, logprobs=0, **GREEDY, **fields)[0] for fields in ({}, {penalty: 1.9}))
    assert len(set(changed["token_ids"])) > len(set(plain["token_ids"]))
    prompt, ids = changed["prompt_token_ids"], changed["token_ids"]
    scored = complete(web, [*prompt, *ids], echo=True, logprobs=0, max_tokens=0)[0]["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(changed["logprobs"]["token_logprobs"], scored[len(prompt) :], atol=10 * ATOL)


def test_a_bias_bans_and_forces(web: httpx.Client, tokenizer: Any) -> None:
    first = complete(web, **GREEDY)[0]["token_ids"][0]
    assert first not in complete(web, **GREEDY, logit_bias={str(first): -100})[0]["token_ids"]
    forced = tokenizer.encode("a")[0]
    assert set(complete(web, **GREEDY, logit_bias={str(forced): 100})[0]["token_ids"]) == {forced}
    by_tokens = web.post(
        "/inference/v1/generate",
        json={"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logit_bias": {str(forced): 100}}},
    )
    assert by_tokens.json()["choices"][0]["token_ids"] == [forced] * 3


def test_an_end_of_turn_that_is_put_off_and_one_that_is_ignored(web: httpx.Client) -> None:
    plain = ask(web, messages=QUESTION, temperature=0, return_token_ids=True)["choices"][0]
    end, length = plain["token_ids"][-1], len(plain["token_ids"])
    later = ask(web, messages=QUESTION, temperature=0, min_tokens=length + 5, return_token_ids=True)["choices"][0]
    assert len(later["token_ids"]) >= length + 6 and end not in later["token_ids"][: length + 5]
    never = ask(web, messages=QUESTION, temperature=0, ignore_eos=True, max_tokens=length + 9, return_token_ids=True)
    assert never["choices"][0]["finish_reason"] == "length" and end in never["choices"][0]["token_ids"][:-1]


def test_the_best_are_those_of_the_highest_mean_logprob(web: httpx.Client) -> None:
    asked = {"seed": 4, "max_tokens": 6, "temperature": 1.5, "logprobs": 0}
    every = complete(web, n=8, **asked)
    means = [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in every]
    reply = ask(web, "/v1/completions", prompt="What is seven?", n=2, best_of=8, return_token_ids=True, **asked)
    expected = [every[i]["token_ids"] for i in np.argsort(means)[::-1][:2]]
    assert [choice["token_ids"] for choice in reply["choices"]] == expected
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in every)


def test_echo_alone_scores_the_prompt(web: httpx.Client, tokenizer: Any) -> None:
    ids = tokenizer.encode("What is seven?")
    reply = ask(web, "/v1/completions", prompt=["What is seven?"], echo=True, max_tokens=0, logprobs=1)
    (choice,) = reply["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "What is seven?" and reply["usage"]["completion_tokens"] == 0
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(ids)
    assert scores["token_logprobs"][0] is None and all(value <= 0 for value in scores["token_logprobs"][1:])
    assert ask(web, "/v1/completions", prompt="Seven", echo=True, max_tokens=0)["choices"][0]["text"] == "Seven"


def test_a_reply_goes_on_with_the_last_message(web: httpx.Client, tokenizer: Any) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Seven and<|im_end|> five"}]
    ending: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    ids = ask(web, messages=messages, max_tokens=1, return_token_ids=True, **ending)["prompt_token_ids"]
    text = tokenizer.decode(ids)
    assert text.endswith("<|im_start|>assistant\nSeven and<|im_end|> five")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == len(QUESTION)
    whole = ask(web, messages=messages, max_tokens=1, return_token_ids=True, add_generation_prompt=False)
    assert tokenizer.decode(whole["prompt_token_ids"]).rstrip().endswith("five<|im_end|>")


def test_as_many_samples_as_the_sampler_takes(web: httpx.Client) -> None:
    choices = ask(web, messages=QUESTION, n=200, max_tokens=1, seed=1)["choices"]
    assert [choice["index"] for choice in choices] == list(range(200))


def test_a_part_of_a_character_has_its_own_bytes(web: httpx.Client, tokenizer: Any) -> None:
    halves = tokenizer.encode("é")
    assert len(halves) == 2 and tokenizer.decode(halves[:1]) == "\N{REPLACEMENT CHARACTER}"
    found = b""
    for half in halves:
        reply = ask(web, messages=QUESTION, max_tokens=1, logprobs=True, logit_bias={str(half): 100})
        (entry,) = reply["choices"][0]["logprobs"]["content"]
        found += bytes(entry["bytes"])
    assert found == "é".encode()


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("words", [1100, 1_000_000])
def test_a_context_that_is_exceeded_has_openai_s_code(web: httpx.Client, route: str, words: int) -> None:
    text = "seven " * words
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}
    error = ask(web, route, status=400, **body)["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    short: dict[str, Any] = {"messages": QUESTION} if "chat" in route else {"prompt": "x"}
    assert ask(web, route, status=400, max_tokens=5000, **short)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in [0.01, 100] (1: none), got 0"),
        ({"logit_bias": {"999999": 1}}, "logit_bias[0] is 999999, outside the vocabulary"),
        ({"logit_bias": {"the": 1}}, "logit_bias has the key 'the'"),
        ({"min_tokens": 3, "stop": "x"}, "min_tokens 3 cannot delay a stop string"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "with ignore_eos a reply under a constraint"),
        ({"best_of": 2, "n": 3}, "best_of=2 is less than n=3"),
        ({"best_of": 2, "stream": True}, "best_of=2 cannot be streamed"),
        ({"max_tokens": 0}, "max_tokens=0 returns only the prompt"),
        ({"suffix": "x"}, "suffix is not supported here"),
        ({"n": 5000}, "n: Input should be less than or equal to 4096"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(web: httpx.Client, body: dict[str, Any], message: str) -> None:
    assert message in ask(web, "/v1/completions", status=400, prompt="x", **body)["error"]["message"]


def test_a_chat_that_has_nothing_to_go_on_with_is_refused(web: httpx.Client) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = [
        (QUESTION, {"add_generation_prompt": False, "continue_final_message": True}),
        ([*QUESTION, {"role": "assistant", "content": "x"}], {"continue_final_message": True}),
    ]
    for messages, fields in asked:
        refused = ask(web, status=400, messages=messages, **fields)
        assert "continue_final_message needs add_generation_prompt=false" in refused["error"]["message"]
