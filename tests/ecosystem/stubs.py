"""What stands in for the hub and for services while a public recipe runs. The recipe itself is not touched."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.ecosystem.data import DATASETS, SAVED, facts, search_rows

Files = Mapping[str, Sequence[str | dict[str, Any]]]
"""Path -> lines of a text file, or rows of a JSONL file."""

TAUGHT, KIMI = "taught", "kimi"
"""Folders of the models that model.py makes; the second has Kimi's control tokens."""
INSTRUCT = "Qwen/Qwen3-4B-Instruct-2507"
"""The name for tinker-cookbook's own library, which knows names alone; its renderer is one that the model was taught with."""
HUB_MODELS = {
    INSTRUCT: TAUGHT,
    "Qwen/Qwen3.5-4B": TAUGHT,
    "Qwen/Qwen3.5-9B": TAUGHT,
    "Qwen/Qwen3.5-9B-Base": TAUGHT,
    "Qwen/Qwen3.6-35B-A3B": TAUGHT,
    "moonshotai/Kimi-K2.6": KIMI,
}
"""What stands in for models that are named: in a program's code, where no key can change it, or for a library's tables."""


def fill_hub_cache(home: Path, models: Path) -> None:
    """Lay out the cache of the model hub below `home` (HF_HOME) with what stands in for each model."""
    for name, stand_in in HUB_MODELS.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        revision = hashlib.sha1(name.encode()).hexdigest()
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(revision)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / revision).symlink_to(models / stand_in, target_is_directory=True)


def install() -> None:
    """Put the stand-ins in place, in this process."""
    _stub_datasets()
    _stub_downloads()
    _stub_search_services()


def _stub_datasets() -> None:
    import datasets

    dictionary: Any = datasets.DatasetDict

    def load_dataset(
        path: str, name: str | None = None, *, split: str | None = None, streaming: bool = False, **_: Any
    ) -> Any:
        splits: Any = {key: datasets.Dataset.from_list(rows()) for key, rows in DATASETS[path].items()}
        found: dict[str, Any] = {key: rows.to_iterable_dataset() if streaming else rows for key, rows in splits.items()}
        return dictionary(found) if split is None else found[split]

    def load_from_disk(dataset_path: str, **_: Any) -> Any:
        return datasets.Dataset.from_list(SAVED[tuple(Path(dataset_path).parts[-2:])]())

    datasets.load_dataset, datasets.load_from_disk = load_dataset, load_from_disk


def _stub_downloads() -> None:
    import huggingface_hub
    import pandas

    download = huggingface_hub.hf_hub_download

    def hf_hub_download(repo_id: str, filename: str, *, repo_type: str | None = None, **settings: Any) -> str:
        if repo_type != "dataset":
            return download(repo_id, filename, repo_type=repo_type, **settings)
        path = Path(settings["local_dir"]) / filename
        pandas.DataFrame(search_rows()).to_parquet(path)
        return str(path)

    huggingface_hub.hf_hub_download = hf_hub_download


class _Collection:
    async def query(self, query_embeddings: list[list[float]], n_results: int) -> dict[str, Any]:
        documents = [f"In the house lives a {animal}." for _, animal in facts(n_results)]
        return {"documents": [documents for _ in query_embeddings]}


class _SearchClient:
    async def get_collection(self, name: str) -> _Collection:
        return _Collection()


async def _connect(**_: Any) -> _SearchClient:
    return _SearchClient()


class _Embeddings:
    async def embed_content(self, *, model: str, contents: list[str], config: Any) -> Any:
        size = config.output_dimensionality
        return SimpleNamespace(embeddings=[SimpleNamespace(values=[float(len(text))] * size) for text in contents])


class _EmbeddingClient:
    def __init__(self, **_: Any) -> None:
        self.aio = SimpleNamespace(models=_Embeddings())


class _Settings:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _stub_search_services() -> None:
    """chromadb is a server with an index of Wikipedia, google.genai a paid service that embeds the queries."""
    import google.protobuf  # noqa: F401 - the SDK's part of the package google, which others have parts of

    types = _module("google.genai.types", HttpOptions=_Settings, EmbedContentConfig=_Settings)
    _module("google.genai", Client=_EmbeddingClient, types=types)
    sys.modules["google"].genai = sys.modules["google.genai"]  # type: ignore[attr-defined]
    api = _module("chromadb.api", AsyncClientAPI=_SearchClient)
    _module("chromadb.api.types", QueryResult=dict)
    _module("chromadb.config", Settings=_Settings)
    _module("chromadb", AsyncHttpClient=_connect, api=api, config=sys.modules["chromadb.config"])


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def write_files(folder: Path, files: Files) -> None:
    """Write lines of text as they are and rows as JSON, below `folder`."""
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
