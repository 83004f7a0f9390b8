"""Who wins: scripted, tossed, by confidence, or by a language model that is asked again and never guessed for."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.debate.arena import TINY, decode, make_renderer, reply_ids
from tests.fakes import FakeServiceClient, SampleCall
from tinker_cookbook import backends
from tinker_cookbook.completers import MessageCompleter, TinkerTokenCompleter
from tinker_cookbook.debate.judges import (
    SCRIPTS,
    ConfidenceJudge,
    DebateView,
    Judge,
    JudgeConfig,
    LMJudge,
    MockJudge,
    ScriptedJudge,
    Verdict,
    Winner,
    check_judge,
    make_judge,
)
from tinker_cookbook.debate.lm_judge import parse_verdict
from tinker_cookbook.debate.prompts import JUDGE_SYSTEM
from tinker_cookbook.debate.views import SeatView
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import Message
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.weights_config import WeightsConfig

A = SeatView(["I say 12.", "A rebuts.", "A closes at length."], 0.9, 1.0, correct=True)
B = SeatView(["I say 13.", "B rebuts.", "B."], 0.25, 0.0, correct=False)
VIEW = DebateView("What is 7 + 5?", (A, B), (3, 1, 0))


def swapped(view: DebateView) -> DebateView:
    """The same debate with the seats exchanged."""
    return view.in_order((1, 0))


def judge(by: Judge, view: DebateView = VIEW) -> Verdict:
    async def ask() -> Verdict:
        return await by(view)

    return asyncio.run(ask())


class TestScripted:
    @pytest.mark.parametrize(
        ("name", "winner"), [("A", "A"), ("B", "B"), ("TIE", "TIE"), ("truth", "A"), ("longer", "A")]
    )
    def test_by_name(self, name: str, winner: str) -> None:
        assert judge(ScriptedJudge(SCRIPTS[name])) == Verdict(Winner(winner), "scripted")

    @pytest.mark.parametrize(
        "by", [ScriptedJudge(SCRIPTS["truth"]), ScriptedJudge(SCRIPTS["longer"]), ConfidenceJudge()]
    )
    def test_changing_seats_changes_the_verdict(self, by: Judge) -> None:
        assert (judge(by).winner, judge(by, swapped(VIEW)).winner) == (Winner.A, Winner.B)

    @pytest.mark.parametrize(
        "by", [ScriptedJudge(SCRIPTS["truth"]), ScriptedJudge(SCRIPTS["longer"]), ConfidenceJudge()]
    )
    def test_equals_tie_and_nobody_is_favoured(self, by: Judge) -> None:
        even = dataclasses.replace(VIEW, seats=(A, A))
        assert judge(by, even).winner is judge(by, swapped(even)).winner is Winner.TIE


class TestConfidence:
    @pytest.mark.parametrize(
        ("a", "b", "winner"),
        [
            (0.9, 0.25, "A"), (0.25, 0.9, "B"), (0.0, 0.01, "B"), (0.5, 0.5, "TIE"), (0.0, 0.0, "TIE"),
            (None, 0.9, "INVALID"), (0.9, None, "INVALID"), (None, None, "INVALID"),
        ],
    )  # fmt: skip
    def test_more_wins_equal_ties_unread_is_invalid(self, a: float | None, b: float | None, winner: str) -> None:
        seats = (dataclasses.replace(A, confidence=a), dataclasses.replace(B, confidence=b))
        view = dataclasses.replace(VIEW, seats=seats)
        reasoning = "no readable confidence" if a is None or b is None else f"confidence {a:g} against {b:g}"
        assert judge(ConfidenceJudge(), view) == Verdict(Winner(winner), reasoning)


KEYS = [(batch, group, debate) for batch in range(20) for group in range(4) for debate in range(5)]


class TestMock:
    def winners(self, seed: int, keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Winner]:
        return {key: judge(MockJudge(seed), dataclasses.replace(VIEW, key=key)).winner for key in keys}

    def test_a_seed_decides_each_debate_in_whatever_order_they_are_asked(self) -> None:
        assert self.winners(7, KEYS) == self.winners(7, KEYS[::-1])

    def test_the_tosses_of_a_seed_stay_what_they_were(self) -> None:
        """Pinned: another mapping from tosses to seats would be as fair, and change every run that is repeated."""
        verdicts = [judge(MockJudge(0), dataclasses.replace(VIEW, key=key)) for key in KEYS[:12]]
        assert verdicts == [Verdict(Winner(seat), "coin toss") for seat in "BBBBBAAAAABA"]

    def test_it_does_not_look_at_what_was_said(self) -> None:
        assert judge(MockJudge(1)).winner is judge(MockJudge(1), swapped(VIEW)).winner

    def test_fair_and_different_for_each_seed(self) -> None:
        first, second = (list(self.winners(seed, KEYS).values()) for seed in (0, 1))
        assert set(first) == {Winner.A, Winner.B}
        assert 0.42 < first.count(Winner.A) / len(first) < 0.58
        agreement = sum(a is b for a, b in zip(first, second, strict=True)) / len(first)
        assert 0.42 < agreement < 0.58


class Says(MessageCompleter):
    """Says these replies in order and keeps what it was asked."""

    def __init__(self, *replies: str):
        self.replies, self.asked = list(replies), list[list[Message]]()

    async def __call__(self, messages: list[Message]) -> Message:
        self.asked.append(messages)
        return {"role": "assistant", "content": self.replies[len(self.asked) - 1]}


class TestVerdictText:
    @pytest.mark.parametrize(
        ("text", "winner"),
        [
            ("<VERDICT>A</VERDICT>", Winner.A),
            ("Well. <VERDICT> B </VERDICT><REASONING>x</REASONING>", Winner.B),
            ("<VERDICT>TIE</VERDICT>", Winner.TIE),
            ("<VERDICT>A</VERDICT> so <VERDICT>A</VERDICT>", Winner.A),
            ("<VERDICT>A</VERDICT> or <VERDICT>B</VERDICT>", None),
            ("<VERDICT>INVALID</VERDICT>", None), ("<VERDICT>C</VERDICT>", None),
            ("<VERDICT></VERDICT>", None), ("A", None), ("", None),
        ],
    )  # fmt: skip
    def test_only_one_clear_verdict_counts(self, text: str, winner: Winner | None) -> None:
        assert parse_verdict(text, VIEW.labels) is winner


class TestLanguageModel:
    def test_over_messages(self) -> None:
        completer = Says("<VERDICT>B</VERDICT><REASONING> because\nB </REASONING> or <REASONING>not</REASONING>")
        verdict = judge(LMJudge(completer))
        assert (verdict.winner, verdict.reasoning, verdict.retries) == (Winner.B, "because\nB", 0)
        assert verdict.raw_response == completer.replies[0]
        ((system, user),) = completer.asked
        assert system == {"role": "system", "content": JUDGE_SYSTEM}
        positions = [str(user["content"]).index(text) for text in (VIEW.context, *VIEW.rounds_a, *VIEW.rounds_b)]
        assert positions == sorted(positions)

    def test_an_unreadable_reply_is_asked_for_again(self) -> None:
        completer = Says("hard to say", "<VERDICT>A</VERDICT>")
        verdict = judge(LMJudge(completer))
        assert (verdict.winner, verdict.retries, len(completer.asked)) == (Winner.A, 1, 2)
        assert completer.asked[0] == completer.asked[1]

    @pytest.mark.parametrize("max_retries", [0, 1, 3])
    def test_then_it_is_invalid(self, max_retries: int) -> None:
        contradiction = "<VERDICT>A</VERDICT><VERDICT>B</VERDICT>"
        completer = Says(*[contradiction] * 9)
        verdict = judge(LMJudge(completer, max_retries=max_retries))
        assert (verdict.winner, verdict.retries) == (Winner.INVALID, max_retries)
        assert verdict.raw_response == contradiction and len(completer.asked) == max_retries + 1

    def test_it_is_asked_again_once_unless_told_otherwise(self) -> None:
        verdict = judge(LMJudge(Says(*["hm"] * 9)))
        assert (verdict.winner, verdict.reasoning, verdict.retries) == (Winner.INVALID, "", 1)

    def test_a_tie_is_a_verdict_and_not_asked_again(self) -> None:
        completer = Says("<VERDICT>TIE</VERDICT>")
        assert judge(LMJudge(completer)).winner is Winner.TIE and len(completer.asked) == 1

    def test_both_seats_are_shown_alike(self) -> None:
        """A judge that goes by content alone finds for the same speech in either seat."""

        class ByContent(MessageCompleter):
            async def __call__(self, messages: list[Message]) -> Message:
                text = str(messages[-1]["content"])
                of_a, of_b = text.split("AGENT A\n")[1].split("AGENT B\n")
                winner = "A" if "12" in of_a else "B" if "12" in of_b else "TIE"
                return {"role": "assistant", "content": f"<VERDICT>{winner}</VERDICT>"}

        by = LMJudge(ByContent())
        assert (judge(by).winner, judge(by, swapped(VIEW)).winner) == (Winner.A, Winner.B)

    def test_a_failure_to_ask_is_an_error_and_no_verdict(self) -> None:
        class Down(MessageCompleter):
            async def __call__(self, messages: list[Message]) -> Message:
                raise ConnectionError("judge is down")

        with pytest.raises(ConnectionError, match="judge is down"):
            judge(LMJudge(Down()))


class TestLanguageModelOverTokens:
    renderer = make_renderer("qwen3_instruct")

    def service(self, *replies: str) -> FakeServiceClient:
        texts = iter(replies)

        def reply(call: SampleCall) -> list[int]:
            return reply_ids(self.renderer, next(texts))

        return FakeServiceClient(reply)

    def lm(self, service: FakeServiceClient, seed: int | None = 5) -> LMJudge:
        return LMJudge(TinkerTokenCompleter(service.new_sampler(0), 64, seed=seed), self.renderer)

    def test_the_call_is_kept_as_ids(self) -> None:
        text = "<VERDICT>A</VERDICT><REASONING>sums</REASONING>"
        service = self.service(text)
        verdict = judge(self.lm(service))
        assert (verdict.winner, verdict.reasoning, verdict.raw_response) == (Winner.A, "sums", text)
        assert verdict.call is not None and verdict.call.prompt_tokens == service.sampled[0].prompt
        assert verdict.call.completion_tokens == reply_ids(self.renderer, text)
        assert verdict.call.completion_logprobs is not None
        assert len(verdict.call.completion_logprobs) == len(verdict.call.completion_tokens)
        assert service.sampled[0].params.stop == self.renderer.get_stop_sequences()

    def test_a_retry_draws_with_another_seed_and_a_repetition_with_the_same(self) -> None:
        service = self.service(*["?", "<VERDICT>B</VERDICT>"] * 3)
        by = self.lm(service)
        for key in ((0, 0, 0), (0, 0, 1), (0, 0, 0)):
            assert judge(by, dataclasses.replace(VIEW, key=key)).retries == 1
        seeds = [call.params.seed for call in service.sampled]
        assert len(set(seeds[:4])) == 4 and seeds[4:] == seeds[:2]
        # Named after the judge, so that a judge and a debater with the same seed do not draw the same.
        assert seeds[:2] == [derive_seed(derive_seed(5, "judge", 0, 0, 0, attempt), 0) for attempt in (0, 1)]

    @pytest.mark.parametrize(("room", "winner"), [(0, Winner.B), (-1, Winner.INVALID)])
    def test_a_debate_beyond_the_judge_s_context_is_invalid_and_not_shown(self, room: int, winner: Winner) -> None:
        service = self.service("<VERDICT>B</VERDICT>")
        judge(self.lm(service))
        longest = len(service.sampled[0].prompt) + room
        service = self.service("<VERDICT>B</VERDICT>")
        completer = TinkerTokenCompleter(service.new_sampler(0), 64)
        verdict = judge(LMJudge(completer, self.renderer, max_prompt_tokens=longest))
        assert verdict.winner is winner and len(service.sampled) == (winner is Winner.B)
        assert verdict.reasoning == ("" if room == 0 else "the debate is too long for the judge's context")

    def test_needs_a_renderer(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"^an LMJudge over a TokenCompleter needs the renderer of its model"
        ):
            LMJudge(TinkerTokenCompleter(self.service().new_sampler(0), 64))


class TestConfig:
    @pytest.mark.parametrize(
        ("name", "kind"), [("mock", MockJudge), ("confidence", ConfidenceJudge), ("scripted:truth", ScriptedJudge)]
    )
    def test_judges_by_name(self, name: str, kind: type) -> None:
        config = JudgeConfig(name=name)
        assert isinstance(asyncio.run(make_judge(config)), kind)

    @pytest.mark.parametrize("name", ["", "moc", "scripted", "scripted:", "scripted:C", "lm:A"])
    def test_unknown_names_are_refused_with_the_known_ones(self, name: str) -> None:
        with pytest.raises(
            ConfigurationError,
            match="is unknown; use mock, confidence, key, lm, decision, acting, endpoint, live, scripted:A",
        ):
            check_judge(JudgeConfig(name=name))

    def test_a_language_model_is_asked_as_configured_while_debate_and_verdict_fit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def reply(call: SampleCall) -> list[int]:
            return reply_ids(make_renderer("qwen3_instruct"), f"<VERDICT>{'AB'[call.weights]}</VERDICT>")

        service = FakeServiceClient(reply, saved={"tinker://run/sampler_weights/x": 1})
        monkeypatch.setattr(backends, "create_service_client", lambda *_: service)

        def verdict(path: str | None = None, **changes: Any) -> Verdict:
            weights = WeightsConfig(base_model=TINY, load_checkpoint_path=path, renderer_name="qwen3_instruct")
            return judge(asyncio.run(make_judge(JudgeConfig(name="lm", weights=weights, **changes))))

        def in_a_window(tokens: int) -> Verdict:
            monkeypatch.setattr(model_info, "get_context_length", lambda _: tokens)
            return verdict(max_tokens=20)

        assert verdict(max_tokens=20, temperature=0.25, seed=3, system_prompt="Decide.").winner is Winner.A
        assert verdict("tinker://run/sampler_weights/x").winner is Winner.B
        call, default = service.sampled
        assert (call.params.max_tokens, call.params.temperature) == (20, 0.25)
        assert call.params.seed == derive_seed(derive_seed(3, "judge", *VIEW.key, 0), 0)
        assert "Decide." in decode(make_renderer("qwen3_instruct"), call.prompt)
        longest = len(default.prompt) + 20
        assert in_a_window(longest).winner is Winner.A
        assert in_a_window(longest - 1).winner is Winner.INVALID

    def test_retries_cannot_be_negative(self) -> None:
        with pytest.raises(ValueError, match="max_retries"):
            JudgeConfig(name="lm", max_retries=-1)
