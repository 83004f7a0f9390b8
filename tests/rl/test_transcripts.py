"""Transcripts for people: what is on them, that every pacing writes the same, and that writing them changes nothing else."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.child import preloaded
from tests.fakes import FakeServiceClient, FakeTokenizer, SampleCall, said
from tests.rl.arena import TalkEnv, Talker
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, NumberEnv, make_config, untimed
from tests.test_logtree import Page
from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import ZeroAdvantageError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.rollout_executor import set_rollout_executor
from tinker_cookbook.rl.rollout_files import StepRollouts
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import (
    FailedGroup,
    do_batch_rollout,
    do_group_rollout,
    do_single_rollout,
    finished_groups,
)
from tinker_cookbook.rl.transcripts import write_evaluations, write_page
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    RolloutError,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils import logtree


def ids(text: str) -> list[int]:
    """What FakeTokenizer decodes to this text."""
    return [ord(character) for character in text]


def prompt(text: str) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(ids(text))


def write(
    folder: Path,
    group: TrajectoryGroup | FailedGroup,
    advantages_G: Sequence[float] | None = None,
    version: int | None = None,
) -> list[dict[str, Any]]:
    """The sections of the groups, as JSON has them; the page has the same texts."""
    step = StepRollouts([group], [version], [] if advantages_G is None else [advantages_G])
    write_page(TrainingRunStore.in_folder(folder), 0, "train", "page", step, FakeTokenizer())  # type: ignore[arg-type]
    folder /= "iteration_000000"
    tree = json.loads((folder / "train_logtree.json").read_text())
    assert Page((folder / "train.html").read_text()).texts.get("pre", []) == ["\n" + text for text in texts(tree)]
    return tree["children"]


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree.get("children", []):
        yield from nodes(child)


def texts(tree: dict[str, Any]) -> list[str]:
    return [node["content"] for node in nodes(tree) if node["kind"] == "text"]


def tables(tree: dict[str, Any], title: str) -> list[dict[str, Any]]:
    return [node for node in nodes(tree) if node["kind"] == "table" and node["title"] == title]


def first_row(table: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(table["columns"], table["rows"][0], strict=True))


class TestPage:
    def test_a_known_group(self, tmp_path: Path) -> None:
        turns = [
            Transition(prompt("Q: 1+1?"), said([*ids("thr"), 200]), 0.0, False, {"tries": 1}, {"verdict": "<no>"}),
            Transition(prompt("Q: 1+1?thr" + chr(200) + "Again!"), said(ids("</pre>2"), "length"), 1.0, True),
        ]
        after = prompt("Q: 1+1?thr" + chr(200) + "Again!</pre>2Right.")
        group = TrajectoryGroup(
            [Trajectory(turns, after, "completed"), Trajectory(turns[:1], prompt(""), "max_turns")],
            [0.5, 0.25],
            [{"group_metric": 7}, {}],
            trained_G=[True, False],
            member_info_G=[{"seat": "first"}, {}],
            tags=["math", "easy"],
        )
        (section,) = write(tmp_path, group, [0.625, -0.625], version=3)
        assert section["title"] == "Group 0 [math, easy], sampled after 3 updates"
        overview, first, second = section["children"]
        assert first["title"] == "Member 0: completed, reward 1.5, advantage 0.625"
        assert second["title"] == "Member 1: max_turns, reward 0.25, advantage -0.625"
        assert first_row(overview) == {
            "member": 0, "reward": 1.5, "final reward": 0.5, "advantage": 0.625, "selected": True, "turns": 2,
            "sampled tokens": 11, "stop reason": "completed",
        }  # fmt: skip
        assert texts(first) == ["Q: 1+1?", "thr<200>", "Again!", "</pre>2", "Right."]
        labels = [node["title"] for node in nodes(first) if node["kind"] == "text"]
        assert labels == [
            "prompt (7 tokens in all)",
            "reply (4 tokens, stop)",
            "observation (17 tokens in all)",
            "reply (7 tokens, length)",
            "observation after the last turn",
        ]
        assert tables(first, "turn 0")[0]["rows"] == [["reward", 0.0], ["tries", 1], ["verdict", "<no>"]]
        assert tables(first, "member")[0]["rows"] == [["group_metric", 7], ["seat", "first"]]

    def test_a_prompt_that_begins_anew_is_shown_whole(self, tmp_path: Path) -> None:
        turns = [Transition(prompt("ab"), said(ids("c")), 0.0, False), Transition(prompt("abX"), said([]), 0.0, True)]
        group = TrajectoryGroup([Trajectory(turns, prompt("other"), "completed")], [0.0], [{}])
        (section,) = write(tmp_path, group)
        assert texts(section) == ["ab", "c", "abX", ""]
        assert "does not extend" in next(node["title"] for node in nodes(section) if node.get("content") == "abX")
        assert "advantage" not in first_row(section["children"][0])

    def test_media_are_named(self, tmp_path: Path) -> None:
        image = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=5)
        ob = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=ids("a")), image])
        later = tinker.ModelInput(chunks=[*ob.chunks, tinker.EncodedTextChunk(tokens=ids("rb"))])
        turns = [Transition(ob, said(ids("r")), 0.0, False), Transition(later, said(ids("s")), 0.0, True)]
        group = TrajectoryGroup([Trajectory(turns, prompt(""), "completed")], [0.0], [{}])
        (section,) = write(tmp_path, group)
        assert texts(section) == ["a[image: 5 tokens]", "r", "b", "s"]

    def test_a_group_that_was_given_up_says_why(self, tmp_path: Path) -> None:
        failed = FailedGroup([RolloutError("OSError", "no <sandbox>")], ["odd"])
        (section,) = write(tmp_path, failed)
        assert tables(section, "given up")[0]["rows"] == [["OSError", "no <sandbox>"]]


class NotedEnv(TalkEnv):
    """Writes what turn it is, from a task of its own too."""

    def __init__(self, name: str):
        super().__init__(turns=2)
        self.name = name

    async def initial_observation(self):
        logtree.log_text(f"{self.name} begins")
        return await super().initial_observation()

    async def step(self, action: list[int], *, extra: Any = None):
        async def aside() -> None:
            logtree.log_text(f"{self.name} aside {turn}")

        turn = self.turn
        with logtree.scope_details(f"{self.name} turn {turn}"):
            await asyncio.sleep(0)
            await asyncio.create_task(aside())
        return await super().step(action, extra=extra)


class NotedGroup(EnvGroupBuilder):
    def __init__(self, name: str):
        self.name = name

    async def make_envs(self) -> Sequence[Env]:
        return [NotedEnv(f"{self.name}{i}") for i in range(2)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        logtree.log_text(f"{self.name} judged")
        return [(1.0, {}), (0.0, {})]


class TestNotes:
    def check(self, group: Any, name: str) -> None:
        assert [node.content for node in group.notes] == [f"{name} judged"]
        for i, trajectory in enumerate(group.trajectories_G):
            first, second = trajectory.transitions
            assert [first.notes[0].content, *(n.title for n in first.notes[1:])] == [
                f"{name}{i} begins",
                f"{name}{i} turn 0",
            ]
            assert [node.content for node in first.notes[1].children] == [f"{name}{i} aside 0"]
            assert [node.title for node in second.notes] == [f"{name}{i} turn 1"]

    def test_each_member_has_its_own(self) -> None:
        builders = [NotedGroup("a"), NotedGroup("b"), NotedGroup("c")]
        policy = TinkerTokenCompleter(FakeServiceClient().new_sampler(0), 4)
        groups = finished_groups(asyncio.run(do_batch_rollout(builders, policy, num_groups_with_notes=2)))
        self.check(groups[0], "a")
        self.check(groups[1], "b")
        assert groups[2].notes == []
        assert all(turn.notes == [] for traj in groups[2].trajectories_G for turn in traj.transitions)

    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_they_come_back_from_an_executor(self, kind: str) -> None:
        with ThreadPoolExecutor(1) if kind == "threads" else ProcessPoolExecutor(1, preloaded()) as executor:
            set_rollout_executor(executor)
            try:
                policy = TinkerTokenCompleter(FakeServiceClient().new_sampler(0), 4)
                group = asyncio.run(do_group_rollout(NotedGroup("a"), policy, with_notes=True))
            finally:
                set_rollout_executor(None)
        self.check(group, "a")

    def test_an_episode_without_a_turn_keeps_them_too(self) -> None:
        class TooLong(NotedEnv):
            async def initial_observation(self) -> Any:
                logtree.log_text("too long")
                return InitialObservationOverflow(0.0)

        with logtree.init_trace("elsewhere") as elsewhere:
            trajectory = asyncio.run(do_single_rollout(Talker(), TooLong("a")))
        assert [node.content for node in trajectory.transitions[0].notes] == ["too long"]
        assert elsewhere.children == []

    def test_they_stand_with_their_member(self, tmp_path: Path) -> None:
        policy = Talker(*[said(ids("hi"))] * 4)
        group = asyncio.run(do_group_rollout(NotedGroup("a"), policy, with_notes=True))
        (section,) = write(tmp_path, group)
        _, first, second, notes = section["children"]
        assert [text for text in texts(first) if text.startswith("a0")] == ["a0 begins", "a0 aside 0", "a0 aside 1"]
        assert not any(text.startswith("a1") for text in texts(first))
        assert [text for text in texts(second) if text.startswith("a1")] == ["a1 begins", "a1 aside 0", "a1 aside 1"]
        assert (notes["title"], texts(notes)) == ("Notes on the group", ["a judged"])


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient(lambda call: [ord("a") + sum(call.prompt) % 3])
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def run(config: train.Config) -> None:
    asyncio.run(train.main(config))


def pages(log_path: Path) -> dict[str, str]:
    """Every text file of the folders of steps. How old a group's weights were is left out."""
    files = [path for path in log_path.glob("iteration_*/*") if path.suffix != ".parquet"]
    found = {str(path.relative_to(log_path)): path.read_text() for path in files}
    return {name: re.sub(r"sampled after \d+ updates", "sampled", text) for name, text in found.items()}


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream 1": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=1)},
    "stream 3": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=3)},
    "async 0": {"async_config": train.AsyncConfig(max_steps_off_policy=0)},
    "async 2": {"async_config": train.AsyncConfig(max_steps_off_policy=2)},
}


def own_evaluator() -> RLTestSetEvaluator:
    return RLTestSetEvaluator(NumberDataset(1, 2, 1, 0), 4, "own", seed=1)


class TestRun:
    def test_every_pacing_writes_the_same(self, service: FakeServiceClient, tmp_path: Path) -> None:
        data = NumberDatasetBuilder(batches=3, with_test=True)
        for name, mode in MODES.items():
            run(make_config(tmp_path / name, data, eval_every=2, num_groups_to_log=2, **mode))
        expected = pages(tmp_path / "sync")
        evaluations = [f"iteration_00000{i}/eval_test" for i in (0, 2, 3)]
        training = [f"iteration_00000{i}/train" for i in range(3)]
        stems = [*evaluations, *training]
        assert sorted(expected) == sorted([f"{s}.html" for s in stems] + [f"{s}_logtree.json" for s in stems])
        for name in MODES:
            assert pages(tmp_path / name) == expected
        tree = json.loads(expected["iteration_000001/train_logtree.json"])
        assert [section["title"] for section in tree["children"]] == [
            "Group 0 [even], sampled",
            "Group 1 [odd], sampled",
        ]
        assert texts(tree)[:2] == ["<0><0><1>", "b"]
        overview = tables(tree, "members")[0]
        rewards = [row[overview["columns"].index("reward")] for row in overview["rows"]]
        advantages = [row[overview["columns"].index("advantage")] for row in overview["rows"]]
        assert rewards == [98.0, 99.0, 97.0, 98.0] and advantages == [0.0, 1.0, -1.0, 0.0]

    @pytest.mark.parametrize("mode", MODES)
    def test_nothing_else_changes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
        seen = []
        for count in (0, 1, 9):
            fake = FakeServiceClient()
            monkeypatch.setattr(backends, "create_service_client", lambda *_, fake=fake: fake)
            data = NumberDatasetBuilder(with_test=True)
            settings = {
                "eval_every": 2,
                "num_groups_to_log": count,
                "evaluator_builders": [own_evaluator],
                **MODES[mode],
            }
            run(make_config(tmp_path / str(count), data, **settings))
            seen.append((untimed(tmp_path / str(count)), fake.calls, fake.sampled))
        assert seen[0] == seen[1] == seen[2]
        assert pages(tmp_path / "0") == {} and not list((tmp_path / "0").glob("iteration_*"))
        assert len(pages(tmp_path / "1")) == len(pages(tmp_path / "9")) == 2 * (4 + 3 + 3)

    def test_a_batch_without_signal_can_be_read(self, service: FakeServiceClient, tmp_path: Path) -> None:
        with pytest.raises(ZeroAdvantageError):
            run(make_config(tmp_path, NumberDatasetBuilder(constant_groups=3)))
        tree = json.loads(pages(tmp_path)["iteration_000000/train_logtree.json"])
        assert len(tree["children"]) == 3 and len(texts(tree)) == 2 * 3 * 4

    def test_a_failed_group_keeps_its_place(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(call: SampleCall) -> list[int]:
            if call.prompt[0] == 0:
                raise OSError("gone")
            return [ord("a") + sum(call.prompt) % 3]

        service.reply = broken
        run(make_config(tmp_path, rollout_error_tolerance=RetryOnFailure(max_retries=0), num_groups_to_log=2))
        tree = json.loads(pages(tmp_path)["iteration_000000/train_logtree.json"])
        failed, other = tree["children"]
        assert tables(failed, "given up")[0]["rows"][0][0] == "OSError" and texts(failed) == []
        assert texts(other)[:2] == ["<1><0><0>", "b"] and first_row(tables(other, "members")[0])["advantage"] == 0.0

    def test_env_authors_can_write(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = NumberEnv.step

        async def step(self: NumberEnv, action: list[int], *, extra: Any = None) -> Any:
            logtree.log_text(f"saw {self.prompt.to_ints()}", label="env")
            return await original(self, action, extra=extra)

        monkeypatch.setattr(NumberEnv, "step", step)
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1), num_groups_to_log=2))
        tree = json.loads(pages(tmp_path)["iteration_000000/train_logtree.json"])
        for group, section in enumerate(tree["children"]):
            members = [child for child in section["children"] if child["kind"] == "details"]
            assert [texts(member)[2:] for member in members] == [[f"saw [{group}, {i}, 0]"] for i in range(4)]

    def test_a_negative_number_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="num_groups_to_log"):
            make_config(tmp_path, num_groups_to_log=-2)

    @pytest.mark.parametrize(("count", "shown"), [(-1, 5), (3, 3)])
    def test_minus_one_is_all_groups(self, service: FakeServiceClient, tmp_path: Path, count: int, shown: int) -> None:
        data = NumberDatasetBuilder(batches=1, groups=5, with_test=True)
        run(make_config(tmp_path, data, write_records=True, num_groups_to_log=count))
        trees = {
            name: json.loads(text) for name, text in pages(tmp_path).items() if name.endswith("train_logtree.json")
        }
        assert [len(tree["children"]) for tree in trees.values()] == [shown]
        record = json.loads((tmp_path / "training_step_0001.json").read_text())
        assert {datum["metadata"]["group_idx"] for datum in record["training_data"]} == set(range(shown))


class TestEvaluator:
    def test_its_name_is_the_page_s(self, service: FakeServiceClient, tmp_path: Path) -> None:
        evaluator = RLTestSetEvaluator(NumberDataset(1, 6, 1, 0), 4, "held/out", num_groups_to_log=2)
        plain = asyncio.run(evaluator(service.new_sampler(0)))
        assert list(tmp_path.iterdir()) == []
        with write_evaluations(TrainingRunStore.in_folder(tmp_path), 7):
            assert asyncio.run(evaluator(service.new_sampler(0))) == plain
        (folder,) = tmp_path.iterdir()
        assert folder.name == "iteration_000007"
        assert sorted(path.name for path in folder.iterdir()) == ["eval_held-out.html", "eval_held-out_logtree.json"]
        tree = json.loads((folder / "eval_held-out_logtree.json").read_text())
        assert len(tree["children"]) == 2

    def test_or_none(self, service: FakeServiceClient, tmp_path: Path) -> None:
        evaluator = RLTestSetEvaluator(NumberDataset(1, 2, 1, 0), 4, num_groups_to_log=0)
        with write_evaluations(TrainingRunStore.in_folder(tmp_path), 7):
            asyncio.run(evaluator(service.new_sampler(0)))
        assert list(tmp_path.iterdir()) == []
