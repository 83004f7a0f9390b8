"""Train a judge on labelled debates: imitate the right verdict, or get a reward for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import chz

from tinker_cookbook.data.rows import BadRows
from tinker_cookbook.debate.decision_judge import verdict_texts
from tinker_cookbook.debate.lm_judge import judge_messages, parse_verdict
from tinker_cookbook.debate.saved import SavedDebate, SavedDebates, labelled, load_debates
from tinker_cookbook.debate.views import Seat, Winner
from tinker_cookbook.decisions.data import Decision, DecisionBatches
from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import Seeded, SystemPrompt
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.supervised.data import conversation_mapper, train_and_test
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.seeds import derive_seed


def both_orders(debate: SavedDebate) -> list[SavedDebate]:
    """The debate in both orders of its seats, so that no position is right more often. A single answer has one order."""
    seats = range(len(debate.view.seats))[::-1]
    swapped = replace(debate, view=debate.view.in_order(seats), verdict=Winner.INVALID)
    return [debate, swapped] if len(seats) > 1 else [debate]


def split_views(path: str, test_share: float, seed: int) -> tuple[list[SavedDebate], list[SavedDebate]]:
    """Split labelled debates, in both orders, into training and test; all debates about a question go to one side.

    Raises ConfigurationError when one side would be empty; also the errors of `load_debates` and `labelled`.
    """
    debates = labelled(load_debates(path))
    questions = sorted({debate.instance_id for debate in debates}, key=lambda name: derive_seed(seed, "held out", name))
    held_out = set(questions[: round(test_share * len(questions))])
    sides: tuple[list[SavedDebate], list[SavedDebate]] = ([], [])
    for debate in debates:
        sides[debate.instance_id in held_out].extend(both_orders(debate))
    if not all(sides):
        raise ConfigurationError(
            f"debates={path!r} has {len(questions)} questions with a labelled debate; with test_share={test_share} one side "
            "of the split is empty. Give more debates, or another share"
        )
    return sides


@chz.chz(typecheck=True)
class LabelledDebates(SystemPrompt, SavedDebates):
    """The labelled debates for training a judge: keys of the datasets here and of recipes."""

    DOCS = docs(
        debates="a run's folder with debate_*.json, or a .jsonl file of labelled debates",
        system_prompt="the judge's system prompt; None: the protocol's",
    )

    test_share: float = chz.field(default=0.25, doc="of the questions, held out with all debates about them")

    @chz.validate
    def _share(self) -> None:
        if not 0 < self.test_share < 1:
            raise ConfigurationError(f"test_share={self.test_share}: must be between 0 and 1")


@chz.chz(typecheck=True)
class JudgeChatBuilder(Seeded, LabelledDebates, ChatDatasetBuilder):
    """Labelled debates as conversations in which the judge gives the right verdict."""

    DOCS = docs(seed="seed of the split")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = split_views(self.debates, self.test_share, self.seed)
        convert = conversation_mapper(self)

        def to_datums(debate: SavedDebate) -> list[tinker.Datum]:
            reply: Message = {"role": "assistant", "content": f"<VERDICT>{debate.label}</VERDICT>"}
            return convert([*judge_messages(debate.view, self.system_prompt), reply])

        bad = BadRows(self.common_config.on_bad_row)
        return train_and_test(train, test, self.common_config, to_datums, bad)


@chz.chz(typecheck=True)
class JudgeDecisionBuilder(Seeded, LabelledDebates, DecisionBatches):
    """Labelled debates as decisions among the verdicts; the right one is the outcome."""

    DOCS = docs(seed="seed of the split")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = split_views(self.debates, self.test_share, self.seed)
        bad = BadRows(self.common_config.on_bad_row)
        return self.batches([self.decision(one) for one in train], [self.decision(one) for one in test], bad)

    def decision(self, debate: SavedDebate) -> Decision:
        """A debate as a judge decides it (`DecisionJudge`)."""
        labels = [*debate.view.labels]
        target = tuple(float(label == str(debate.label)) for label in labels)
        messages = tuple(judge_messages(debate.view, self.system_prompt))
        return Decision(messages, tuple(verdict_texts(labels)), target, debate.instance_id)


class JudgeEnv(OneTurnEnv):
    """One labelled debate; the reward is 1 for the right verdict, else 0. A TIE is wrong, because one side is right."""

    def __init__(
        self, debate: SavedDebate, renderer: Renderer, system_prompt: str | None, max_prompt_tokens: int | None
    ):
        super().__init__(renderer)
        self.debate, self.system_prompt = debate, system_prompt
        self.instance_id, self.max_prompt_tokens = debate.instance_id, max_prompt_tokens

    def get_messages(self) -> list[Message]:
        return judge_messages(self.debate.view, self.system_prompt)

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        verdict = parse_verdict(reply.text, self.debate.view.labels)
        right = float(verdict is self.debate.label)
        metrics: Metrics = {
            "correct": right,
            "parsed": float(verdict is not None),
            "tie": float(verdict is Winner.TIE),
            "stopped": float(reply.stopped),
        }
        if verdict is not None and verdict.seat is not None:
            metrics["first_seat"] = float(verdict.seat is Seat.A)
        return right, metrics

    def get_reference_answer(self) -> str:
        return str(self.debate.label)


@chz.chz(typecheck=True)
class JudgeTraining(LabelledDebates, Environment):
    """Labelled debates as questions for a judge, in both orders; `group_size` verdicts on each."""

    def check(self, settings: DatasetSettings) -> None:
        """Raises as `split_views`."""
        split_views(self.debates, self.test_share, settings.seed)

    async def groups(self, settings: DatasetSettings) -> Groups:
        renderer = settings.renderer()

        def make(debate: SavedDebate, attempts: int, place: Place) -> OneTurnGroupBuilder:
            env = partial(JudgeEnv, debate, renderer, self.system_prompt, settings.max_prompt_tokens)
            return OneTurnGroupBuilder(env, attempts, "judge", "judge")

        return Groups(make, *split_views(self.debates, self.test_share, settings.seed))
