"""A terminal: drawn tasks can be solved and are not solved at the start, and episodes end as they should."""

import asyncio
import json
import pickle
import random
from pathlib import Path

import pytest

from tests.sandbox.running import usable
from tinker_cookbook.env.shipped.terminal.tasks import _SCRIPTS, TerminalTask, find_and_count, read_tasks, repair
from tinker_cookbook.env.shipped.terminal.terminal_env import Terminal, TerminalEnv
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.rl.message_env import MessageStepResult
from tinker_cookbook.sandbox import SandboxLimits
from tinker_cookbook.sandbox.session import MAX_SHOWN

LIMITS = SandboxLimits(wall_s=60.0)
HELLO = TerminalTask("hello", "Write hello to x.", {"a": "1\n"}, 'test "$(cat x)" = hello')


def play(
    task: TerminalTask, *replies: str, max_turns: int = 4, limits: SandboxLimits = LIMITS
) -> list[MessageStepResult]:
    env = pickle.loads(pickle.dumps(TerminalEnv(task, usable(), limits, max_turns)))

    async def main() -> list[MessageStepResult]:
        await env.initial_observation()
        return [await env.step({"role": "assistant", "content": reply}) for reply in replies]

    return asyncio.run(main())


def bash(command: str) -> str:
    return f"I try this.\n```bash\n{command}\n```"


class TestEpisodes:
    def test_files_last_from_command_to_command(self) -> None:
        first, second, last = play(HELLO, bash("echo hello > y; cd /"), bash("ls; mv y x"), "Done.")
        assert not first.episode_done and first.reward == 0
        assert first.next_messages[-1]["content"] == "[exit code 0]"
        assert second.next_messages[-1]["content"] == "a\ny\n[exit code 0]"
        assert last.episode_done and last.reward == 1.0
        assert (last.metrics["commands"], last.metrics["said_done"], last.metrics["failed_commands"]) == (2, 1, 0)

    def test_it_is_checked_after_the_last_command(self) -> None:
        (_, result) = play(HELLO, bash("false"), bash("echo hello > x"), max_turns=2)
        assert result.episode_done and result.reward == 1.0 and result.metrics["failed_commands"] == 1.0

    def test_a_goal_that_is_not_reached(self) -> None:
        (result,) = play(HELLO, "It is done.")
        assert result.episode_done and result.reward == 0 and result.metrics["correct"] == 0

    def test_a_command_that_reaches_a_limit_is_told(self) -> None:
        first, _ = play(HELLO, bash("rm a; sleep 1000"), bash("ls"), limits=SandboxLimits(wall_s=0.5))
        assert first.next_messages[-1]["content"] == "[killed: wall_s=0.5; the folder is as it was before]"

    def test_a_folder_too_large_to_keep_is_told(self) -> None:
        first, second = play(
            HELLO, bash("truncate -s 300M x; rm a"), bash("ls"), limits=SandboxLimits(wall_s=60.0, disk_mb=8)
        )
        assert "[killed: disk_mb=8; the folder is as it was before]" in str(first.next_messages[-1]["content"])
        assert second.next_messages[-1]["content"] == "a\n[exit code 0]"

    def test_long_output_is_cut_in_the_middle(self) -> None:
        (result,) = play(HELLO, bash("seq 1 2000"))
        text = str(result.next_messages[-1]["content"])
        assert len(text) < MAX_SHOWN + 100 and text.startswith("1\n2\n") and "characters]" in text and "2000" in text

    def test_hidden_files_are_there_for_the_check_alone(self) -> None:
        task = TerminalTask("t", "?", {}, "cat secret; cat x", {"secret": "s", "x": "hidden"}, expected="shidden")
        first, last = play(task, bash("ls -a; echo mine > x"), "Done.")
        assert "secret" not in str(first.next_messages[-1]["content"])
        assert last.reward == 1.0  # the check's own x lies over the policy's

    def test_what_a_program_prints_is_compared_outside(self) -> None:
        task = TerminalTask("t", "?", {"p.sh": "echo no"}, "sh p.sh; exit 0", expected="yes")
        assert play(task, bash("echo 'exit 0' > p.sh"), "Done.")[-1].reward == 0
        assert play(task, bash("echo 'echo yes; exit 7' > p.sh"), "Done.")[-1].reward == 1


class TestRepair:
    @pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.name)
    def test_every_fault_breaks_it_and_the_right_text_repairs_it(self, script) -> None:
        wanted: set[str] = set(script.faults)
        tasks: dict[str, TerminalTask] = {}
        for seed in range(1000):
            task = repair(random.Random(seed))
            if script.name in task.files:
                broken = task.files[script.name]
                tasks.setdefault(broken, task)
        assert set(tasks) == {script.text.replace(fault, script.faults[fault]) for fault in wanted}
        for broken, task in tasks.items():
            assert broken != script.text
            first, last = play(task, bash("sh check.sh"), "It works.")
            assert "it works" not in str(first.next_messages[-1]["content"]) and last.reward == 0, task
        task = next(iter(tasks.values()))
        write = bash(f"cat > {script.name} <<'END'\n{script.text}END\nsh check.sh")
        first, last = play(task, write, "It works.")
        assert first.next_messages[-1]["content"] == "it works\n[exit code 0]" and last.reward == 1.0

    def test_meeting_the_shown_check_alone_is_not_enough(self) -> None:
        task = repair(random.Random(0))
        (name,) = (name for name in task.files if name not in ("check.sh", "input.txt", "expected.txt"))
        says = "print(open('expected.txt').read())" if name.endswith(".py") else "cat expected.txt"
        first, last = play(task, bash(f'echo "{says}" > {name}; sh check.sh'), "It works.")
        assert "it works" in str(first.next_messages[-1]["content"]) and last.reward == 0
        first, last = play(task, bash("echo 'echo it works' > check.sh; sh check.sh"), "It works.")
        assert "it works" in str(first.next_messages[-1]["content"]) and last.reward == 0


class TestCount:
    def test_the_answer_is_that_of_the_usual_commands(self) -> None:
        """Each question, answered by grep and find."""
        seen: dict[str, TerminalTask] = {}
        for seed in range(60):
            task = find_and_count(random.Random(seed))
            seen.setdefault(" ".join(task.goal.split()[2:5]) + task.goal.split("?")[0][-12:][-1:], task)
            kind = task.goal.split(", ", 1)[1].split("?")[0]
            words = kind.split()
            if kind.startswith("how many files end"):
                command = f"find data -name '*{words[-1]}' | wc -l"
            elif "contain the text" in kind:
                command = f"grep -rl {words[-1]} data | wc -l"
            elif "have together" in kind:
                command = f"find data -name '*{words[-3]}' -exec cat {{}} + | wc -l"
            elif "are exactly" in kind:
                command = f"grep -rhx {words[5].rstrip(',')} data | wc -l"
            else:
                command = "find data -type f -empty | wc -l"
            if seed < 15:
                assert play(task, bash(f"{command} > answer.txt"), "Done.")[-1].reward == 1.0, (kind, command)
        assert len(seen) > 1

    def test_no_answer(self) -> None:
        task = find_and_count(random.Random(1))
        assert play(task, "Done.")[-1].reward == 0
        assert play(task, bash("echo 12345 > answer.txt"), "Done.")[-1].reward == 0

    def test_the_same_seed_draws_the_same_task(self) -> None:
        for draw in (find_and_count, repair):
            assert draw(random.Random(3)) == draw(random.Random(3)) != draw(random.Random(4))


class TestTasksOfAFile:
    def write(self, tmp_path: Path, *rows: object) -> str:
        file = tmp_path / "tasks.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    def test_they_are_read_and_grouped(self, tmp_path: Path) -> None:
        usable()
        file = self.write(tmp_path, {"id": 1, "goal": "?", "files": {"a": "1"}, "check": "true"})
        assert read_tasks(file) == [TerminalTask("1", "?", {"a": "1"}, "true")]
        env = Terminal(dataset=file, test_dataset=file)
        builder = env.dataset_builder("tiny_chat", groups_per_batch=1, group_size=2, num_batches=1)
        train, test = asyncio.run(builder())
        assert len(train.get_batch(0)) == 1 and test is not None
        with pytest.raises(ConfigurationError, match="groups_per_batch=2, but the dataset has 1 tasks"):
            env.dataset_builder("tiny_chat", groups_per_batch=2)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"goal": "?"}, "has no 'check'"),
            ({"goal": "?", "check": "true", "files": []}, "files must be an object"),
            ({"goal": "?", "check": "true", "files": {"a": 1}}, "files must be an object"),
            ({"goal": "?", "check": "true", "expected": 3}, "expected=3: must be a text"),
        ],
    )
    def test_rows_that_are_no_task(self, tmp_path: Path, row: object, message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            read_tasks(self.write(tmp_path, row))

    def test_held_out_tasks_without_others(self) -> None:
        usable()
        with pytest.raises(ConfigurationError, match="drawn tasks need none"):
            Terminal(test_dataset="x.jsonl").dataset_builder("tiny_chat")

    def test_no_sandbox_no_dataset(self) -> None:
        with pytest.raises(ConfigurationError, match="without isolation only"):
            Terminal(sandbox=None).dataset_builder("tiny_chat")
