"""Rubrics: verdicts that are read, both orders, what is asked once, and a recipe whose reward a grader gives."""

import asyncio
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes import rubric
from recipes.common import for_model
from tests.debate.arena import make_renderer, reply_ids
from tests.fakes import FakeServiceClient, SampleCall
from tests.rl import loop
from tinker_cookbook import cli_utils
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.env.lm_rubric import Criterion, RubricGrader, parse_grades, parse_preferences
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, get_text_content

CRITERIA = [Criterion(name="clear", wanted="easy to read", weight=3.0), Criterion(name="kind", wanted="friendly")]
RENDERER = make_renderer("qwen3_instruct")


class Scripted(MessageCompleter):
    def __init__(self, say: Callable[[str], str]):
        self.say, self.asked = say, list[str]()

    async def __call__(self, messages: list[Message]) -> Message:
        self.asked.append(get_text_content(messages[1]))
        assert "CLEAR: easy to read" in get_text_content(messages[0])
        return {"role": "assistant", "content": self.say(self.asked[-1])}


def score(say: Callable[[str], str], *replies: str) -> tuple[list[Any], Scripted]:
    completer = Scripted(say)
    grader = RubricGrader(completer, CRITERIA)

    async def all_of() -> list[Any]:
        return list(await asyncio.gather(*(grader.score("q", reply) for reply in replies)))

    return asyncio.run(all_of()), completer


def test_the_reward_is_the_weighted_mean_and_the_same_reply_is_graded_once() -> None:
    found, completer = score(lambda _: "Fine. <CLEAR>8</CLEAR> <kind> 4 </kind>", "a", "a", "b")
    assert found[0][0] == pytest.approx((3 * 0.8 + 0.4) / 4) and found[0] == found[1]
    assert found[0][1] == {"clear": 0.8, "kind": 0.4, "unreadable": 0.0}
    assert len(completer.asked) == 2


def test_what_cannot_be_read_is_asked_again_and_then_counts_nothing() -> None:
    said = iter(["<CLEAR>8</CLEAR>", "<CLEAR>8</CLEAR><KIND>2</KIND>"])
    found, completer = score(lambda _: next(said), "a")
    assert found[0][1]["unreadable"] == 0.0 and len(completer.asked) == 2
    assert score(lambda _: "<CLEAR>8</CLEAR><KIND>11</KIND>", "a")[0] == [(0.0, {"unreadable": 1.0})]


@pytest.mark.parametrize(
    ("text", "grades"),
    [
        ("<CLEAR>1</CLEAR><KIND>2</KIND><CLEAR>3</CLEAR>", {"clear": 0.3, "kind": 0.2}),
        ("<CLEAR>-1</CLEAR><KIND>2</KIND>", None),
        ("<CLEAR>1.5</CLEAR><KIND>2</KIND>", None),
        ("<CLEAR>٣</CLEAR><KIND>2</KIND>", None),
        ("<KIND>2</KIND>", None),
        ("", None),
        ("x" * 200_000, None),
        ("<CLEAR>" * 20_000 + "1</CLEAR><KIND>0</KIND>", {"clear": 0.1, "kind": 0.0}),
    ],
)
def test_grades_are_whole_numbers_between_tags(text: str, grades: dict[str, float] | None) -> None:
    assert parse_grades(text, ["clear", "kind"]) == grades


def test_preferences_are_a_b_or_tie() -> None:
    assert parse_preferences("<CLEAR>a</CLEAR><KIND>TIE</KIND>", ["clear", "kind"]) == {"clear": 1.0, "kind": 0.5}
    assert parse_preferences("<CLEAR>C</CLEAR><KIND>TIE</KIND>", ["clear", "kind"]) is None


def compare(say: Callable[[str], str], a: str, b: str) -> tuple[float, dict[str, float]]:
    return asyncio.run(RubricGrader(Scripted(say), CRITERIA).compare("q", a, b))


def test_a_grader_who_prefers_a_place_decides_nothing() -> None:
    share, metrics = compare(lambda _: "<CLEAR>A</CLEAR><KIND>A</KIND>", "short", "long")
    assert share == 0.5 and metrics["order_disagreement"] == 1.0


def by_length(request: str) -> str:
    first, second = (re.findall(rf"Reply {name}:\n(\w*)", request)[0] for name in "AB")
    best = "A" if len(first) < len(second) else "B" if len(second) < len(first) else "TIE"
    return f"<CLEAR>{best}</CLEAR><KIND>TIE</KIND>"


def test_shares_are_those_of_the_replies_and_not_of_their_places() -> None:
    assert compare(by_length, "a", "bbb")[0] == pytest.approx(1 - compare(by_length, "bbb", "a")[0])
    share, metrics = compare(by_length, "a", "bbb")
    assert share == pytest.approx((3 + 0.5) / 4) and metrics["order_disagreement"] == 0.0
    completer = Scripted(by_length)
    ranked = asyncio.run(RubricGrader(completer, CRITERIA).rank("q", ["bb", "a", "ccc", "bb"]))
    assert [share for share, _ in ranked] == pytest.approx([0.5, 0.875, 0.125, 0.5])
    assert [metrics["clear"] for _, metrics in ranked] == pytest.approx([0.5, 1.0, 0.0, 0.5])
    assert {metrics["kind"] for _, metrics in ranked} == {0.5}
    assert len(completer.asked) == 6  # three different pairs in two orders
    assert compare(lambda _: "no", "a", "b") == (
        0.5,
        {"clear": 0.5, "kind": 0.5, "order_disagreement": 0.0, "unreadable": 1.0},
    )


def test_a_failure_is_not_remembered_and_a_grader_can_travel() -> None:
    tries = iter([True, False])

    def fails_once(_: str) -> str:
        if next(tries):
            raise OSError("no line")
        return "<CLEAR>8</CLEAR><KIND>2</KIND>"

    grader = RubricGrader(Scripted(fails_once), CRITERIA)
    with pytest.raises(OSError, match="no line"):
        asyncio.run(grader.score("q", "a"))
    assert asyncio.run(grader.score("q", "a"))[0] > 0
    assert pickle.loads(pickle.dumps(RubricGrader(Scripted(by_length), CRITERIA))).criteria == grader.criteria


@pytest.mark.parametrize(
    "criteria",
    [[], [CRITERIA[0], Criterion(name="CLEAR", wanted="again")], [Criterion(name="Unreadable", wanted="scrawled")]],
)
def test_criteria_have_names_of_their_own(criteria: list[Criterion]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"at least one criterion|a name is given twice|another metric has that name"
    ):
        RubricGrader(Scripted(by_length), criteria)


def cli_of(*arguments: str) -> rubric.CLIConfig:
    return for_model(cli_utils.parse(rubric.CLIConfig, list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "grader: no grader is named; give grader.endpoint.base_url"),
        (["grader.weights.base_model=./nowhere", "grader.weights.backend=local"], "grader.weights"),
        (
            ["grader.endpoint.model=judge", "grader.endpoint.base_url=here"],
            "grader.endpoint.base_url='here' is not an address",
        ),
        (
            ["grader.endpoint.model=judge", "grader.endpoint.base_url=http://a/v1"],
            "grader.endpoint.api_key_variable=OPENAI_API_KEY: this environment variable is not set",
        ),
        (["grader.weights.base_model=tiny_chat", "criteria=nothing.toml"], "criteria='nothing.toml': .*No such file"),
        (["grader.weights.base_model=tiny_chat", "num_rollouts=30"], "num_rollouts=30 is not divisible"),
    ],
)
def test_what_is_missing_is_said_before_anything_loads(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match=message):
        rubric.make_dataset_builder(cli_of(*arguments))


@pytest.mark.parametrize("mode", ["score", "compare"])
def test_a_run_is_rewarded_by_its_grader(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criteria = tmp_path / "criteria.toml"
    criteria.write_text('[[criteria]]\nname = "clear"\nwanted = "easy to read"\n')
    graders: list[Scripted] = []

    async def open_grader(config: Any, name: str, found: Any, service: Any) -> RubricGrader:
        assert service is made
        said = "<CLEAR>{}</CLEAR>"
        alone = lambda request: said.format(len(request.partition("Reply:\n")[2]) % 11)  # noqa: E731
        graders.append(Scripted(alone if mode == "score" else by_length))
        return RubricGrader(graders[-1], found)

    def reply(call: SampleCall) -> list[int]:
        return reply_ids(RENDERER, "a" * (1 + (call.params.seed or 0) % 5))

    made = FakeServiceClient(reply)
    monkeypatch.setattr("tinker_cookbook.env.lm_rubric.RubricGraderConfig.open", open_grader)
    monkeypatch.setattr("tinker_cookbook.backends.create_service_client", lambda *_, **__: made)
    keys = [
        "grader.weights.base_model=tiny_chat",
        f"criteria={criteria}",
        "num_rollouts=8",
        "num_groups=2",
        "max_steps=2",
    ]
    builder = rubric.make_dataset_builder(cli_of(f"mode={mode}", "num_test=2", *keys))
    loop.run(loop.make_config(tmp_path / "run", builder))
    row = loop.rows(tmp_path / "run")[0]
    name = {"score": "reward/grade", "compare": "reward/share"}[mode]
    assert 0 < row["env/all/reward/total"] < 1
    assert row["env/all/reward/total"] == pytest.approx(row[f"env/all/{name}"])
    if mode == "compare":
        assert row["env/all/reward/share"] == pytest.approx(0.5) and row["env/all/reward/share/order_disagreement"] == 0
    assert len(graders) == 1 and len(graders[0].asked) > 0
