"""Endpoints as judges, graders and teachers: what is sent, what is sent again, what is counted, and what is kept."""

import asyncio
import http.server
import json
import math
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes import eval_benchmarks, single_turn
from tests.debate.test_judges import VIEW
from tests.waiting import HANG_SECONDS, start_serving, until
from tinker_cookbook import endpoints
from tinker_cookbook.debate.judges import JudgeConfig, StepJudgeConfig, Winner, check_judge, make_judge
from tinker_cookbook.debate.views import step_view
from tinker_cookbook.distillation.prompt_distillation import label_lines_by_text
from tinker_cookbook.endpoints import EndpointCompleter, EndpointConfig, as_openai
from tinker_cookbook.env.lm_grader import GraderConfig, LMGrader, parse_grade
from tinker_cookbook.env.reward_functions import RewardSpec
from tinker_cookbook.env.steps import Step
from tinker_cookbook.exceptions import ConfigurationError, EndpointError
from tinker_cookbook.renderers import Message, ToolCall
from tinker_cookbook.runs.ml_log import read_metrics

QUESTION: list[Message] = [{"role": "user", "content": "What is 7 + 5?"}]
Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]
"""(how many requests there were before, the request's body) -> status, body of the answer"""


def saying(text: str, **message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": text, **message}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3},
    }


class Endpoint:
    """An OpenAI-compatible endpoint on a thread, whose answers a function gives."""

    def __init__(self, answer: Answer, headers: dict[str, str]):
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.now = 0
        lock, endpoint = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(endpoint.asked)
                    endpoint.asked.append(body)
                    endpoint.keys.append(self.headers["authorization"])
                    endpoint.now += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint.now)
                status, said = answer(number, body)
                with lock:
                    endpoint.now -= 1
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        start_serving(self.server)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def config(self, **keys: Any) -> EndpointConfig:
        return EndpointConfig(**{"base_url": self.url, "model": "m", "api_key_variable": None, **keys})

    def completer(self, seed: int | None = None, **keys: Any) -> EndpointCompleter:
        return self.config(**keys).open("judge.endpoint", 16, 0.5, seed)


@pytest.fixture
def serve() -> Iterator[Callable[..., Endpoint]]:
    running: list[Endpoint] = []

    def start(answer: Answer, **headers: str) -> Endpoint:
        running.append(Endpoint(answer, headers))
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.server.shutdown()
        endpoint.server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_SECONDS", 0.001)


def ask(completer: EndpointCompleter, messages: list[Message] = QUESTION) -> Message:
    async def once() -> Message:
        return await completer(messages)

    return asyncio.run(once())


def soft_reply(**likely: float) -> dict[str, Any]:
    text = f"<VERDICT>{next(iter(likely))}</VERDICT>"
    content = [
        {"token": letter, "logprob": -0.1, "top_logprobs": [{"token": letter, "logprob": -0.1}]} for letter in text
    ]
    content[len("<VERDICT>")]["top_logprobs"] = [
        {"token": token, "logprob": logprob} for token, logprob in likely.items()
    ]
    said = saying(text)
    said["choices"][0]["logprobs"] = {"content": content}
    return said


def test_a_soft_judge_reads_the_probabilities_off_the_reply(serve: Callable[..., Endpoint], tmp_path: Path) -> None:
    endpoint = serve(lambda *_: (200, soft_reply(B=-0.5, A=-1.5, T=-2.5)))
    config = endpoint.config(api_key_variable=None, cache_dir=str(tmp_path))
    judge = asyncio.run(make_judge(JudgeConfig(name="endpoint", endpoint=config, soft=True)))
    verdict, again = asyncio.run(judge(VIEW)), asyncio.run(judge(VIEW))
    weights = [math.exp(value) for value in (-1.5, -0.5, -2.5)]
    a, b, tie = (weight / sum(weights) for weight in weights)
    assert verdict.winner is Winner.B and verdict.shares == pytest.approx((a + tie / 2, b + tie / 2))
    (asked,) = endpoint.asked
    assert (asked["logprobs"], asked["top_logprobs"], asked["temperature"]) == (True, 20, 0.0)
    assert again.shares == verdict.shares and again.usage["cached"] == 1


def test_an_endpoint_without_logprobs_has_no_soft_verdict(serve: Callable[..., Endpoint]) -> None:
    config = serve(lambda *_: (200, saying("<VERDICT>A</VERDICT>"))).config(api_key_variable=None)
    judge = asyncio.run(make_judge(JudgeConfig(name="endpoint", endpoint=config, soft=True)))
    with pytest.raises(
        EndpointError, match=r"answers without choices\[0\]\.logprobs; use an endpoint that has top_logprobs"
    ):
        asyncio.run(judge(VIEW))


def test_a_call_says_what_was_configured_and_counts_what_it_took(
    serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = serve(lambda number, body: (200, saying("12")))
    monkeypatch.setenv("MY_KEY", "secret-key")
    completer = endpoint.completer(api_key_variable="MY_KEY", prompt_price=2.0, completion_price=10.0)
    assert ask(completer) == {"role": "assistant", "content": "12"}
    assert endpoint.asked == [{"model": "m", "messages": QUESTION, "max_tokens": 16, "temperature": 0.5}]
    assert endpoint.keys == ["Bearer secret-key"]
    assert completer.usage() == {
        "calls": 1, "cached": 0, "resent": 0, "prompt_tokens": 10, "completion_tokens": 3, "cost": pytest.approx(5e-5),
    }  # fmt: skip
    assert "secret-key" not in repr(completer) + str(pickle.dumps(completer))
    other = endpoint.completer(max_tokens_field="max_completion_tokens")
    ask(other)
    assert endpoint.asked[1]["max_completion_tokens"] == 16 and "max_tokens" not in endpoint.asked[1]
    assert endpoint.keys[1] is None and "cost" not in other.usage()


def test_what_may_pass_is_sent_again_and_what_will_not_is_told_at_once(serve: Callable[..., Endpoint]) -> None:
    flaky = serve(lambda number, body: ((429, 503, 200)[number], saying("12")), **{"Retry-After": "0.01"})
    completer = flaky.completer()
    assert ask(completer)["content"] == "12"
    assert len(flaky.asked) == 3 and completer.usage()["resent"] == 2
    down = serve(lambda number, body: (500, b"oops"))
    with pytest.raises(EndpointError, match=r"^judge\.endpoint: http.*model 'm'.*HTTP 500: oops \(3 attempts\)$"):
        ask(down.completer(max_retries=2))
    wrong = serve(lambda number, body: (401, {"error": {"message": "no such key"}}))
    with pytest.raises(EndpointError, match=r"HTTP 401: no such key$"):
        ask(wrong.completer())
    assert len(wrong.asked) == 1
    for nonsense in (b"<html>", {"choices": []}, {"choices": [{"message": {"tool_calls": [{}]}}]}):
        with pytest.raises(EndpointError, match=r"does not answer with JSON|has no message"):
            ask(serve(lambda number, body, said=nonsense: (200, said)).completer())


def test_nobody_there_and_no_answer_in_time(serve: Callable[..., Endpoint]) -> None:
    gone = serve(lambda number, body: (200, saying("")))
    gone.server.shutdown()
    gone.server.server_close()
    with pytest.raises(EndpointError, match=r"cannot be reached \(ConnectError.*\) \(2 attempts\)"):
        ask(gone.completer(max_retries=1))
    release = threading.Event()

    def slow(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(HANG_SECONDS)
        return 200, saying("")

    with pytest.raises(EndpointError, match=r"did not answer within timeout_seconds=0\.2$"):
        ask(serve(slow).completer(max_retries=0, timeout_seconds=0.2))
    release.set()


def test_no_more_than_so_many_at_a_time(serve: Callable[..., Endpoint]) -> None:
    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        until(lambda: endpoint.now >= 3 or len(endpoint.asked) > 17)  # until others have come, if there are any left
        return 200, saying(str(number))

    endpoint = serve(answer)
    completer = endpoint.completer(max_concurrency=3)

    async def crowd() -> None:
        await asyncio.gather(*(completer.fork(i)(QUESTION) for i in range(20)))

    asyncio.run(crowd())
    assert len(endpoint.asked) == 20 and endpoint.most_at_once == 3


def test_seeds_follow_from_the_fork_and_the_call(serve: Callable[..., Endpoint]) -> None:
    endpoint = serve(lambda number, body: (200, saying("")))
    completer = endpoint.completer(seed=1)
    for _ in range(2):
        fork = completer.fork("judge", 3)
        ask(fork)
        ask(fork)
    seeds = [body["seed"] for body in endpoint.asked]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
    ask(endpoint.completer(seed=1, send_seed=False))
    assert "seed" not in endpoint.asked[-1]


def test_replies_are_kept_by_what_was_asked(serve: Callable[..., Endpoint], tmp_path: Path) -> None:
    endpoint = serve(lambda number, body: (200, saying(f"reply {number}")))
    kept = {"cache_dir": str(tmp_path / "kept"), "send_seed": False}
    first = ask(endpoint.completer(seed=1, **kept).fork("a"))
    again = endpoint.completer(seed=1, **kept).fork("a")
    assert ask(again) == first and len(endpoint.asked) == 1
    assert again.usage() | {"calls": 1.0, "cached": 1.0, "prompt_tokens": 0.0} == again.usage()
    assert ask(again) != first  # a second call asks for another reply
    assert ask(endpoint.completer(seed=1, **kept).fork("b")) != first
    assert ask(endpoint.completer(seed=1, **kept).fork("a"), [{"role": "user", "content": "?"}]) != first
    assert len(endpoint.asked) == 4
    assert json.loads(next((tmp_path / "kept").rglob("*.json")).read_text()).keys() == {"request", "reply"}


def test_it_pickles_with_its_seed(serve: Callable[..., Endpoint]) -> None:
    endpoint = serve(lambda number, body: (200, saying("")))
    completer = endpoint.completer(seed=4)
    ask(completer.fork(1))
    ask(pickle.loads(pickle.dumps(completer)).fork(1))
    assert endpoint.asked[0] == endpoint.asked[1]


def test_tool_calls_go_both_ways(serve: Callable[..., Endpoint]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    endpoint = serve(lambda number, body: (200, saying("", content=None, tool_calls=[call])))
    said = ask(endpoint.completer())
    function = ToolCall.FunctionBody(name="add", arguments='{"a": 7}')
    assert said == {"role": "assistant", "content": "", "tool_calls": [ToolCall(id="1", function=function)]}
    assert as_openai(said)["tool_calls"] == [call]
    thought: Message = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
    }
    assert as_openai(thought) == {"role": "assistant", "content": "a"}
    with pytest.raises(ConfigurationError, match=r"^judge: messages\[0\] holds image; an endpoint is sent text only"):
        as_openai({"role": "user", "content": [{"type": "image", "image": "x"}]}, "judge: messages[0]")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"base_url": None}, r"judge\.endpoint\.base_url=None is not an address"),
        ({"base_url": "127.0.0.1:8000"}, r"base_url='127\.0\.0\.1:8000' is not an address"),
        ({"model": None}, r"judge\.endpoint\.model is missing"),
        ({"api_key_variable": "NO_SUCH_KEY"}, r"NO_SUCH_KEY: this environment variable is not set"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_asked(keys: dict[str, Any], message: str) -> None:
    good = {"base_url": "http://x/v1", "model": "m", "api_key_variable": None}
    with pytest.raises(ConfigurationError, match=message):
        check_judge(JudgeConfig(name="endpoint", endpoint=EndpointConfig(**{**good, **keys})))
    check_judge(JudgeConfig(name="endpoint", endpoint=EndpointConfig(**good)))


def test_an_endpoint_that_nobody_asks_is_an_error() -> None:
    endpoint = EndpointConfig(base_url="http://x/v1", model="m")
    with pytest.raises(ConfigurationError, match="set judge=endpoint, or drop"):
        check_judge(JudgeConfig(name="mock", endpoint=endpoint))
    with pytest.raises(ConfigurationError, match=r"set step_judge=endpoint, or drop"):
        check_judge(StepJudgeConfig(endpoint=endpoint))


def test_a_judge_asks_again_until_it_can_read_the_verdict(serve: Callable[..., Endpoint]) -> None:
    said = ["hm", "<REASONING>B is right</REASONING><VERDICT>B</VERDICT>"]
    endpoint = serve(lambda number, body: (200, saying(said[number])))

    async def decide() -> Any:
        return await (await make_judge(JudgeConfig(name="endpoint", endpoint=endpoint.config(), seed=1)))(VIEW)

    verdict = asyncio.run(decide())
    assert (verdict.winner, verdict.reasoning, verdict.retries) == (Winner.B, "B is right", 1)
    assert verdict.usage["calls"] == 2 and verdict.usage["prompt_tokens"] == 20
    first, second = endpoint.asked
    assert first["messages"] == second["messages"] and first["seed"] != second["seed"]
    assert VIEW.rounds_a[1] in first["messages"][1]["content"]


def test_a_step_judge(serve: Callable[..., Endpoint]) -> None:
    said = ["<VERDICT>WRONG</VERDICT>", "<VERDICT>RIGHT</VERDICT>", "hm"]
    endpoint = serve(lambda number, body: (200, saying(said[number])))
    config = StepJudgeConfig(name="endpoint", endpoint=endpoint.config())

    async def check() -> list[Winner]:
        judge = await make_judge(config, seed=3)
        return [(await judge(step_view(Step("the first step", "1 + 1 = 3", False), (i,)))).winner for i in range(3)]

    assert asyncio.run(check()) == [Winner.B, Winner.A, Winner.INVALID]


def test_a_grader_is_a_reward(serve: Callable[..., Endpoint]) -> None:
    said = ["<GRADE>7</GRADE>", "eleven", "<GRADE>11</GRADE>"]
    endpoint = serve(lambda number, body: (200, saying(said[number])))
    spec = RewardSpec.parse(LMGrader(endpoint.completer(seed=1)))

    async def grade(reply: str) -> tuple[float, dict[str, float]]:
        return await spec(None, "What is 7 + 5?", "12", reply)

    reward, metrics = asyncio.run(grade("twelve"))
    assert reward == 0.7 and metrics["LMGrader/prompt_tokens"] == 10 and metrics["LMGrader/unreadable"] == 0
    assert "Reference:\n12" in endpoint.asked[0]["messages"][1]["content"]
    reward, metrics = asyncio.run(grade("thirteen"))
    assert reward == 0 and metrics["LMGrader/unreadable"] == 1 and metrics["LMGrader/calls"] == 2
    texts = (
        "<GRADE>0</GRADE> <GRADE> 10 </GRADE>",
        "<GRADE>-1</GRADE>",
        "<GRADE>\u0663</GRADE>",
    )  # the last is an Arabic 3
    assert [parse_grade(text) for text in texts] == [10, None, None]


def test_a_teacher_by_text(serve: Callable[..., Endpoint]) -> None:
    endpoint = serve(lambda number, body: (200, saying(f"Answer: {body['messages'][1]['content']}!")))
    pattern = re.compile(r"Answer: (\w)")
    labelled = asyncio.run(label_lines_by_text(endpoint.completer(), "Obey.", ["a", "b", "?"], pattern))
    assert [(item.line, item.answer) for item in labelled] == [("a", "a"), ("b", "b"), ("?", None)]
    assert {body["messages"][0]["content"] for body in endpoint.asked} == {"Obey."}


def test_a_run_is_evaluated_by_an_endpoint(
    serve: Callable[..., Endpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grades, and what they cost, are metrics of each evaluation; the reward that trains is the task's own."""
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    endpoint = serve(lambda number, body: (200, saying("<GRADE>3</GRADE>")))
    keys = {
        "log_path": str(tmp_path / "run"),
        "max_steps": 1,
        "num_rollouts": 4,
        "num_groups": 2,
        "num_test": 3,
        "max_tokens": 4,
        "lora_rank": 2,
        "on_zero_advantages": "skip",
        "eval_grader": GraderConfig(endpoint=endpoint.config(prompt_price=1.0)),
    }
    asyncio.run(single_turn.main(single_turn.CLIConfig(**keys)))
    rows = [row for row in read_metrics(tmp_path / "run") if "graded/env/all/reward/total" in row]
    assert len(rows) == 2 and len(endpoint.asked) == 6
    for row in rows:
        assert row["graded/env/all/reward/total"] == pytest.approx(0.3)
        assert row["graded/env/all/reward/LMGrader/prompt_tokens"] == 10


def test_weights_are_graded_by_an_endpoint(serve: Callable[..., Endpoint], tmp_path: Path) -> None:
    endpoint = serve(lambda number, body: (200, saying("<GRADE>8</GRADE>")))
    keys = {
        "benchmarks": ("qa/arithmetic",),
        "max_items": 2,
        "num_samples": 2,
        "pass_at": (1,),
        "max_tokens": 4,
        "success_metric": "reward",
        "save_dir": str(tmp_path / "out"),
        "grader": GraderConfig(endpoint=endpoint.config()),
    }
    asyncio.run(eval_benchmarks.main(eval_benchmarks.CLIConfig(**keys)))
    (result,) = json.loads((tmp_path / "out" / "summary.json").read_text())["benchmarks"].values()
    assert (result["pass@1"], result["reward"]) == (1.0, 0.8) and len(endpoint.asked) == 4
    assert result["reward/LMGrader/prompt_tokens"] == 40 and result["reward/LMGrader/calls"] == 4
    other = GraderConfig(endpoint=endpoint.config(), system_prompt="Be strict.")
    with pytest.raises(ConfigurationError, match="results with other settings"):
        asyncio.run(eval_benchmarks.main(eval_benchmarks.CLIConfig(**{**keys, "grader": other})))
