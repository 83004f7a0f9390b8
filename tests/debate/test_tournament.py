"""Tournaments: ratings that are those of the games, pairings that keep their rules, and debates between written players."""

import asyncio
import math
from itertools import combinations

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from recipes.debate_tournament import CLIConfig, table_rows, tournament
from tests.debate.arena import make_renderer
from tinker_cookbook import cli_utils
from tinker_cookbook.debate.debaters import DEBATERS, Brief, ScriptedDebater
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.tournament import CrossPlay, Game, elo, round_robin, swiss_round
from tinker_cookbook.exceptions import ConfigurationError

RENDERER = make_renderer("qwen3_instruct")


def games(a: str, b: str, wins: int, losses: int) -> list[Game]:
    return [Game(a, b, f"item-{i}", float(i < wins)) for i in range(wins + losses)]


class TestElo:
    def test_odds_of_ten_to_one_are_400_points(self) -> None:
        """But for the tie with an average player that everybody has."""
        found = elo(games("x", "y", 1000, 100), ["x", "y"])
        assert found["x"].mean - found["y"].mean == pytest.approx(400, abs=2)
        assert found["x"].mean + found["y"].mean == pytest.approx(0, abs=1e-6)

    def test_order_of_seats_does_not_matter(self) -> None:
        swapped = [Game(g.b, g.a, g.item, 1 - g.score) for g in games("x", "y", 7, 3) if g.score is not None]
        assert elo(swapped, ["x", "y"])["x"].mean == pytest.approx(elo(games("x", "y", 7, 3), ["x", "y"])["x"].mean)

    def test_ratings_are_transitive_in_between(self) -> None:
        """Who was never met is placed through others."""
        found = elo([*games("x", "y", 80, 20), *games("y", "z", 80, 20)], ["x", "y", "z"])
        assert found["x"].mean - found["z"].mean == pytest.approx(2 * 400 * math.log10(4), abs=30)

    def test_who_never_loses_has_a_finite_rating_and_no_verdict_counts_for_nothing(self) -> None:
        played = [*games("x", "y", 5, 0), Game("x", "y", "item-9", None)]
        found = elo(played, ["x", "y"])
        assert found["x"] == elo(games("x", "y", 5, 0), ["x", "y"])["x"] and 100 < found["x"].mean < 1000

    def test_intervals_hold_what_questions_say(self) -> None:
        wide, narrow = (elo(games("x", "y", 6 * n, 4 * n), ["x", "y"])["x"] for n in (1, 20))
        assert wide.low < wide.mean < wide.high and narrow.high - narrow.low < (wide.high - wide.low) / 2
        assert elo([], ["x", "y"])["x"].mean == pytest.approx(0)


class TestPairings:
    def test_everybody_meets_everybody_once(self) -> None:
        assert round_robin(["a", "b", "c"]) == list(combinations("abc", 2))

    @given(st.integers(2, 9), st.integers(0, 99), st.lists(st.booleans(), min_size=60, max_size=60))
    def test_swiss(self, count: int, seed: int, outcomes: list[bool]) -> None:
        """Nobody twice in a round, and no pair twice while rounds are fewer than opponents could be; byes go round."""
        players, played, met = [f"p{i}" for i in range(count)], list[Game](), set[frozenset[str]]()
        for _ in range(min(3, count // 2)):
            pairs = swiss_round(players, played, seed)
            named = [name for pair in pairs for name in pair]
            assert len(named) == len(set(named)) == count - count % 2
            if count >= 6:
                assert not met & {frozenset(pair) for pair in pairs}
            met |= {frozenset(pair) for pair in pairs}
            played += [Game(a, b, "item", float(outcomes[len(played) + i])) for i, (a, b) in enumerate(pairs)]

    def test_equals_meet(self) -> None:
        players = ["a", "b", "c", "d"]
        first = [Game("a", "b", "i", 1.0), Game("c", "d", "i", 1.0)]
        assert {frozenset(pair) for pair in swiss_round(players, first)} == {frozenset("ac"), frozenset("bd")}


class TestDebaters:
    def brief(self, answers: bool, heard: str = "They said: so it goes") -> Brief:
        return Brief(answers, "12", "13", heard)

    def test_what_they_answer_and_say(self) -> None:
        answers = {name: "12</SOLUTION>" in say(self.brief(True)) for name, say in DEBATERS.items()}
        assert answers == {"honest": True, "liar": False, "copycat": False, "verbose": False, "conceding": True}
        said = {name: say(self.brief(False)) for name, say in DEBATERS.items()}
        assert "12 is right" in said["honest"] and "13 is right" in said["liar"]
        assert said["copycat"] == "They said: so it goes" and "I was wrong" in said["conceding"]
        assert len(said["verbose"]) > 10 * len(said["liar"])

    def test_one_speaks_in_tokens_and_stops(self) -> None:
        player = ScriptedDebater("honest", RENDERER, "12", "13")
        prompt, stop = (
            tinker.ModelInput.from_ints(RENDERER.encode_text("What is 7 + 5?")),
            RENDERER.get_stop_sequences(),
        )
        first, second = (asyncio.run(player(prompt, stop)) for _ in range(2))
        assert "<SOLUTION>12</SOLUTION>" in str(RENDERER.tokenizer.decode(first.tokens))
        assert first.tokens[-1] == stop[0] and first.logprobs == [0.0] * len(first.tokens)
        assert "SOLUTION" not in str(RENDERER.tokenizer.decode(second.tokens))
        with pytest.raises(ConfigurationError, match="'bold' is unknown; use honest, liar"):
            ScriptedDebater("bold", RENDERER, "12", "13")

    def test_seats_are_forked_to_their_players(self) -> None:
        seats = [ScriptedDebater(name, RENDERER, "12", "13") for name in ("honest", "liar")]
        found = [CrossPlay(seats).fork("group", 0).fork("member", member) for member in range(4)]
        assert [getattr(player, "_name", None) for player in found] == ["honest", "liar", "honest", "liar"]


class TestTournament:
    def run(self, judge: str, **keys) -> dict[str, list[str]]:
        players = ("honest", "liar", "verbose")
        cli = CLIConfig(players=players, judge=JudgeConfig(name=judge), items=4, **keys)
        played = asyncio.run(tournament(cli))
        return {row[0]: row for row in table_rows(played, players)} | {"games": [str(len(played))]}

    def test_the_truth_wins_where_the_judge_knows_it(self) -> None:
        found = self.run("key")
        assert next(iter(found)) == "honest" and found["honest"][3:] == ["16", "0", "0"]
        assert found["liar"][3:] == ["0", "8", "0"] and found["games"] == ["24"]

    def test_words_win_where_the_judge_counts_them(self) -> None:
        assert next(iter(self.run("scripted:longer"))) == "verbose"

    def test_a_seat_does_not_matter_since_it_is_swapped(self) -> None:
        found = self.run("scripted:A")
        assert all(found[name][3:] == ["8", "0", "0"] for name in ("honest", "liar", "verbose"))

    def test_swiss(self) -> None:
        found = self.run("key", schedule="swiss", rounds=2)
        assert found["games"] == ["16"]

    def test_each_is_proposer_and_critic(self) -> None:
        found = self.run("key", protocol=ProtocolConfig(name="proposer_critic", rounds=1))
        assert found["honest"][3:] == ["16", "0", "0"]  # it proposes what is right, and objects to what is wrong
        assert found["liar"][3:] == found["verbose"][3:] == ["4", "0", "0"]  # as critics of each other

    def test_a_match_is_between_two(self) -> None:
        for config in (ProtocolConfig(seats=3), ProtocolConfig(name="direct")):
            with pytest.raises(ConfigurationError, match="a match is between two players"):
                CLIConfig(protocol=config)

    def test_protocol_and_judge_have_short_forms(self) -> None:
        cli = cli_utils.parse(CLIConfig, ["protocol=proposer_critic", "judge=key"])
        assert (cli.protocol.name, cli.judge.name) == ("proposer_critic", "key")

    @pytest.mark.parametrize("players", [("honest",), ("honest", "honest")])
    def test_too_few_players(self, players: tuple[str, ...]) -> None:
        with pytest.raises(ConfigurationError, match="players="):
            CLIConfig(players=players)
