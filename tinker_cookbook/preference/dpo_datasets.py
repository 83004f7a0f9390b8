"""Labeled comparisons as pairs of sequences for DPO: each batch is chosen, rejected, chosen, rejected, ..."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import chz

from tinker_cookbook.data.rows import BadRows
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.preference_datasets import ComparisonRow, FromComparisons, Rows
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.data import conversation_to_datum, train_and_test
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.lazy import tinker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairRenderer:
    """A comparison as two datums (chosen, rejected) whose `weights` are 1 on the tokens of the reply, 0 elsewhere."""

    renderer: Renderer
    max_length: int | None
    train_on_what: TrainOnWhat

    def __call__(self, row: ComparisonRow) -> list[tinker.Datum]:
        """Raises RendererError, or DataValidationError when truncation leaves no pair."""
        labeled = row.labeled
        assert labeled.chosen is not None and labeled.rejected is not None, "ties are removed earlier"
        prompt = labeled.comparison.prompt_conversation
        pair = [self._datum(prompt, labeled.chosen, "chosen"), self._datum(prompt, labeled.rejected, "rejected")]
        if _is_same(*pair):
            raise DataValidationError(
                f"chosen and rejected are the same {pair[0].model_input.length + 1} tokens with "
                f"max_length={self.max_length}; raise max_length, or leave the comparison out"
            )
        return pair

    def _datum(self, prompt: list[Message], completion: list[Message], which: str) -> tinker.Datum:
        conversation = [*prompt, *completion]
        datum = conversation_to_datum(conversation, self.renderer, self.max_length, self.train_on_what, "none")
        if not datum.loss_fn_inputs["weights"].to_numpy().any():
            raise DataValidationError(
                f"max_length={self.max_length} leaves no token of the {which} reply; raise max_length, or leave the "
                "comparison out"
            )
        return datum


def _is_same(left: tinker.Datum, right: tinker.Datum) -> bool:
    targets = [datum.loss_fn_inputs["target_tokens"].tolist() for datum in (left, right)]
    return left.model_input == right.model_input and targets[0] == targets[1]


@chz.chz(typecheck=True)
class DPODatasetBuilderFromComparisons(FromComparisons, ChatDatasetBuilder):
    """Pairs from labeled comparisons; `common_config.batch_size` counts pairs, and no pair is split.

    Ties do not say which reply is better, so they are skipped, and their number is logged. The last assistant turn is
    compared unless common_config.train_on_what says otherwise.
    """

    @chz.validate
    def _check_common_config(self) -> None:
        if self.common_config.split_rewritten:
            raise ConfigurationError("split_rewritten=True: a pair is two sequences; leave split_rewritten out")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        config = self.common_config
        bad = BadRows(config.on_bad_row)
        train, test = self.comparison_builder.get_rows(bad)
        to_pair = PairRenderer(
            self.renderer, config.max_length, config.train_on_what or TrainOnWhat.LAST_ASSISTANT_TURN
        )
        train_pairs = _without_ties(train, "training")
        if not train_pairs:
            raise ConfigurationError("there is nothing to train on: all training comparisons are ties")
        return train_and_test(train_pairs, _without_ties(test or [], "test"), config, to_pair, bad)


def _without_ties(rows: Rows, which: str) -> Rows:
    kept = [row for row in rows if row.labeled.chosen is not None]
    if len(kept) < len(rows):
        logger.info("%d of %d %s comparisons are ties, which DPO skips", len(rows) - len(kept), len(rows), which)
    return kept
