"""One-line functions: what is held out, how replies are read, and that nothing of them is run."""

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tinker_cookbook.env.shipped.code.lines import (
    CHECKED,
    CodeLines,
    LineEnv,
    LineProgram,
    evaluate_line,
    line_conversations,
    line_programs,
    question_text,
    read_line,
    split_programs,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.rl.message_env import MessageStepResult
from tinker_cookbook.rl.types import InitialObservationOverflow

STEPS = 2


def values(line: str) -> tuple[int, ...]:
    return tuple(evaluate_line(line, x) for x in CHECKED)


def play(program: LineProgram, reply: str) -> MessageStepResult:
    async def main() -> MessageStepResult:
        env = LineEnv(program, "words")
        await env.initial_observation()
        return await env.step({"role": "assistant", "content": reply})

    return asyncio.run(main())


class TestPrograms:
    def test_a_line_gives_what_its_program_says(self) -> None:
        assert all(values(program.line) == program.values for program in line_programs(STEPS))

    def test_no_held_out_program_occurs_in_training(self) -> None:
        """By what they compute: x + x is 2 * x, whichever was written."""
        train, test = split_programs(STEPS, "train"), split_programs(STEPS, "test")
        assert {values(program.line) for program in train}.isdisjoint(values(program.line) for program in test)
        everything = [*train, *test]
        assert len({program.values for program in everything}) == len({p.words for p in everything}) == len(everything)
        assert {program.line for program in everything} == {program.line for program in line_programs(STEPS)}
        assert len(train) > 1000 and 0.1 < len(test) / len(everything) < 0.3

    def test_a_program_is_in_the_same_split_whatever_the_number_of_steps(self) -> None:
        fewer, more = ({p.values for p in split_programs(steps, "test")} for steps in (1, 2))
        assert fewer == set() and more.isdisjoint(p.values for p in split_programs(1, "train"))

    def test_each_step_occurs_in_training(self) -> None:
        words = {part for program in split_programs(STEPS, "train") for part in program.words.split(", then ")}
        assert words >= {part for program in split_programs(STEPS, "test") for part in program.words.split(", then ")}

    def test_the_order_is_always_the_same(self) -> None:
        state = random.getstate()
        assert split_programs(1, "train") == split_programs(1, "train") and random.getstate() == state

    def test_conversations_show_right_lines_of_training_programs_alone(self) -> None:
        conversations = list(line_conversations(1, "words"))
        assert len(conversations) == len(split_programs(1, "train"))
        for conversation, program in zip(conversations, split_programs(1, "train"), strict=True):
            assert play(program, get_text_content(conversation[-1])).reward == 1.0

    @pytest.mark.parametrize("steps", [0, 4])
    def test_steps_that_there_are_not(self, steps: int) -> None:
        with pytest.raises(ConfigurationError, match=f"steps={steps}: must be from 1 to 3"):
            CodeLines(steps=steps)


class TestReplies:
    program = next(program for program in line_programs(STEPS) if program.line == "(x + 1) * 2")

    @pytest.mark.parametrize(
        "reply", ["(x + 1) * 2", "2 * x + 2", " return x+x+2\n", "```python\ndef f(x): return 2*(1+x)\n```"]
    )
    def test_right_however_it_is_written(self, reply: str) -> None:
        result = play(self.program, reply)
        assert result.reward == 1.0 and result.episode_done and result.metrics["correct"] == 1.0

    def test_a_part_is_paid_for_a_part(self) -> None:
        result = play(self.program, "max(x, 0) * 2 + 2")
        assert 0 < result.reward < 1 and result.metrics["correct"] == 0 and result.metrics["valid_line"] == 1
        assert result.reward == pytest.approx(25 / len(CHECKED))

    @pytest.mark.parametrize(
        "reply",
        ["", "x +", "y", "x / 2", "x ** x", "x ** 9", "1 // 0", "True", "'x'", "x if x else 1", "lambda: x", "max(x)",
         "abs(x, x)", "max(*[x])", "max(*[x], 1)", "print(x)", "__import__('os').system('true')", "x.real", "[x][0]", "(x := 3)",
         "x\nx", "x" * 300, "((((((x ** 4) ** 4) ** 4) ** 4) ** 4) ** 4) ** 4", "999999999999999", "(" * 150 + "x"],
    )  # fmt: skip
    def test_anything_else_is_wrong_and_never_run(self, reply: str) -> None:
        result = play(self.program, reply)
        assert result.reward < 1 and result.metrics["valid_line"] == 0

    @given(st.text(alphabet="x123+-*/% ()maxbsin,.", max_size=40))
    @examples(300)
    def test_any_reply_is_read(self, reply: str) -> None:
        with suppress(ValueError):
            assert isinstance(evaluate_line(read_line(reply), 3), int)

    def test_questions(self) -> None:
        assert question_text(self.program, "words") == "add 1, then multiply by 2\ndef f(x): return"
        assert question_text(self.program, "examples").startswith("f(-3) = -4\nf(0) = 2\n")


def test_groups() -> None:
    builder = CodeLines(steps=1).dataset_builder("tiny_chat", groups_per_batch=4, group_size=2, num_batches=2)

    async def main() -> None:
        train, _ = await builder()
        (group, *_) = train.get_batch(0)
        first, second = [await env.initial_observation() for env in await group.make_envs()]
        assert not isinstance(first, InitialObservationOverflow) and not isinstance(second, InitialObservationOverflow)
        assert first[0].to_ints() == second[0].to_ints()

    asyncio.run(main())
