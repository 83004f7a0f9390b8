"""The shipped articles in place of a dataset of the hub, which no test can reach."""

import json
from typing import Any

import datasets
import pytest

from tests.child import ROOT
from tinker_cookbook.data import hub

ARTICLES = ROOT / "example_data" / "summary" / "articles_train.jsonl"


def stand_in_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cnn_dailymail` is 24 articles to train on and 8 to test with, until the test is over."""
    rows = [json.loads(line) for line in ARTICLES.read_text().splitlines()]
    train, test = (datasets.Dataset.from_list(part) for part in (rows[:24], rows[24:32]))
    load = hub.load

    def load_named(name: str, *args: Any, **kwargs: Any) -> Any:
        if "cnn_dailymail" in name:
            return datasets.DatasetDict({"train": train, "test": test})
        return load(name, *args, **kwargs)

    monkeypatch.setattr(hub, "load", load_named)
