"""Labelling by a prompted teacher, reading its answers, and how often the student without the prompt agrees."""

import asyncio
import re
from pathlib import Path

import pytest

from recipes.prompt_distillation import create_data
from tests.fakes import FakeSamplingClient, SampleCall
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation.prompt_distillation import (
    AgreementEvaluator,
    Sampling,
    ask_lines,
    check_pattern,
    label_lines,
    read_answer,
)
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.data import read_conversations
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tools import multilingual
from tools.multilingual import LANGUAGES, LINES_PER_LANGUAGE, labelled_lines

MODEL = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(MODEL)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=MODEL)
SUM = re.compile(create_data.TASKS["sums"]().answer_pattern)
LANGUAGE = re.compile(create_data.TASKS["languages"]().answer_pattern)


def echoing(sampled: list[SampleCall] | None = None) -> FakeSamplingClient:
    """Replies with what the user said, after "told: " when there was a system prompt."""

    def reply(call: SampleCall) -> list[int]:
        text = str(TOKENIZER.decode(call.prompt))
        said = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        told = "told: " if "<|im_start|>system" in text else ""
        return [*TOKENIZER.encode(told + said), TOKENIZER.encode("<|im_end|>")[0]]

    return FakeSamplingClient(0, reply, [], [] if sampled is None else sampled)


class TestReadingAnswers:
    @pytest.mark.parametrize(
        ("pattern", "reply", "answer"),
        [
            (SUM, "<SOLUTION>48</SOLUTION>", "48"),
            (SUM, "8 * 6 = 48.", "48"),
            (SUM, "I do not know.", None),
            (LANGUAGE, "Answer: de", "de"),
            (LANGUAGE, "The letters are Greek.\nAnswer: el ", "el"),
            (LANGUAGE, "sv", "sv"),
            (LANGUAGE, "Answer: German", None),
            (LANGUAGE, "Answer: de, I think", None),
        ],
    )
    def test_the_tasks_patterns(self, pattern: re.Pattern[str], reply: str, answer: str | None) -> None:
        assert read_answer(pattern, reply) == answer

    def test_the_last_match_counts_and_of_it_the_first_group(self) -> None:
        assert read_answer(re.compile(r"(\d+)"), "1 + 2 is 3") == "3"
        assert read_answer(re.compile(r"(\d+)( apples)?"), "3 apples or 4") == "4"

    def test_bad_patterns(self) -> None:
        with pytest.raises(ConfigurationError, match="not a regular expression"):
            check_pattern("(")
        with pytest.raises(ConfigurationError, match="has no group"):
            check_pattern("x")


class TestLabelling:
    def test_every_line_is_asked_under_the_prompt_in_order(self) -> None:
        sampled: list[SampleCall] = []
        lines = [f"What is {i} + 1?" for i in range(70)]
        labelled = asyncio.run(label_lines(echoing(sampled), RENDERER, "Obey.", lines, SUM, Sampling(8)))
        assert [item.line for item in labelled] == lines
        assert [item.reply for item in labelled] == [f"told: {line}" for line in lines]
        assert {item.answer for item in labelled} == {"1"}
        assert all(call.params.temperature == 0 and call.params.max_tokens == 8 for call in sampled)
        assert len({call.params.seed for call in sampled}) == len(lines)

    def test_without_a_prompt_there_is_no_system_message(self) -> None:
        assert asyncio.run(ask_lines(echoing(), RENDERER, ["a"], Sampling(8))) == ["a"]

    def test_agreement_counts_equal_answers(self) -> None:
        evaluator = AgreementEvaluator(RENDERER, ["1 + 5", "2 + 6", "none"], ["5", "7", "8"], SUM, Sampling(8))
        assert asyncio.run(evaluator(echoing())) == {"test/agreement": 1 / 3, "test/readable": 2 / 3}

    def test_lines_and_answers_must_pair(self) -> None:
        with pytest.raises(ConfigurationError, match="2 lines and 1 answers"):
            AgreementEvaluator(RENDERER, ["a", "b"], ["1"], SUM, Sampling(8))


class TestCreateData:
    def test_the_shipped_model_labels_sums(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        keys = create_data.CLIConfig(output_path=str(tmp_path), max_lines=40, test_size=10)
        asyncio.run(create_data.main(keys))
        files = [read_conversations(str(tmp_path / name)) for name in ("train.jsonl", "test.jsonl")]
        assert [len(rows) for rows in files] == [30, 10]
        lines = [rows.messages[0]["content"] for file in files for rows in file]
        assert len(set(map(str, lines))) == 40
        assert {message["role"] for rows in files[0] for message in rows.messages} == {"user", "assistant"}
        assert str(files[0][0].messages[1]["content"]).startswith("<SOLUTION>")
        right = float(re.findall(r"right in (\d\.\d+) of 40", capsys.readouterr().out)[0])
        assert right > 0.9

    def test_a_teacher_that_cannot_follow_the_prompt_is_told_of(self, tmp_path: Path) -> None:
        (tmp_path / "prompt.txt").write_text("Say Answer: and a code.")
        keys = create_data.CLIConfig(
            output_path=str(tmp_path / "data"),
            task="languages",
            prompt_path=str(tmp_path / "prompt.txt"),
            max_lines=6,
            test_size=2,
            max_tokens=8,
        )
        with pytest.raises(DataError, match=r"could be read in \d of 6 replies.*its first reply"):
            asyncio.run(create_data.main(keys))
        assert not (tmp_path / "data").exists()

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"input_path": "/no/such.txt"}, "no such file"),
            ({"prompt_path": "/no/such.txt"}, "no such file"),
            ({"answer_pattern": "("}, "not a regular expression"),
            ({"max_lines": 100}, "test_size=100 of 100 lines leaves nothing"),
        ],
    )
    def test_bad_keys(self, keys: dict, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            create_data.read_task(create_data.CLIConfig(output_path="x", **keys))


class TestMultilingual:
    def test_the_shipped_files_are_what_the_generator_writes(self, tmp_path: Path) -> None:
        multilingual.main(multilingual.CLIConfig(folder=str(tmp_path)))
        for name in (multilingual.FILE, multilingual.LANGUAGES_FILE):
            assert (tmp_path / name).read_bytes() == (EXAMPLE_DATA / name).read_bytes()

    def test_the_recipe_knows_the_language_of_each_line(self) -> None:
        assert create_data.TASKS["languages"]().lines == labelled_lines()

    def test_every_language_has_its_share_and_its_own_lines(self) -> None:
        codes = list(labelled_lines().values())
        assert {code: codes.count(code) for code in LANGUAGES} == dict.fromkeys(LANGUAGES, LINES_PER_LANGUAGE)
        assert len(codes) == 2100

    def test_the_prompt_names_every_code(self) -> None:
        listed = create_data.LANGUAGES_PROMPT.splitlines()[-1].split()
        assert listed == sorted([*LANGUAGES, "ot"])
        scripts = {code for code in LANGUAGES if f": {code}" in create_data.LANGUAGES_PROMPT.replace("\n", " ")}
        latin = {code for code in LANGUAGES if f"- {code}: " in create_data.LANGUAGES_PROMPT}
        assert scripts | latin == set(LANGUAGES)
