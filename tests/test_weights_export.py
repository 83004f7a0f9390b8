"""What must hold of exported weights: PEFT and transformers load them and compute what was trained."""

import asyncio
import gc
import io
import json
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save as to_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import export as export_recipe
from recipes import rl_basic
from tinker_cookbook import weights
from tinker_cookbook.backends import create_service_client
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, MissingPackageError, WeightsDownloadError
from tinker_cookbook.runs.checkpoints import last_sampler_path, newest_of_run
from tinker_cookbook.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tinker_cookbook.weights_config import WeightsConfig

TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENS = list(range(5, 45))
MATRICES = to_bytes({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 3)})
"""A file that can be read, and names nothing that an export renames."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that changed the weights a lot, and the home its checkpoint is in."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_LOCAL_HOME", str(folder / "home"))
        patch.delenv("TINKER_BACKEND", raising=False)
        gc.collect()  # lets go of a client that an earlier test left behind, whose home is another
        argv = ["groups_per_batch=4", "group_size=8", "max_steps=2", "num_test=2", "max_tokens=12", "eval_every=2"]
        argv += ["learning_rate=0.02", "lora_rank=4", f"log_path={folder / 'log'}"]
        run_recipe(rl_basic.CLIConfig, rl_basic.main, argv=argv)
        yield folder


def command(*argv: str) -> None:
    run_recipe(export_recipe.CLIConfig, export_recipe.main, argv=list(argv))


@torch.no_grad()
def logprobs(model: Any) -> list[float]:
    tokens = torch.tensor([TOKENS])
    scores = model.float()(tokens).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def trained_logprobs(run: Path) -> list[float]:
    import tinker

    async def score() -> list[float | None]:
        client = await WeightsConfig(load_checkpoint_path=last_sampler_path(run / "log")).open("trained")
        return await client.compute_logprobs(tinker.ModelInput.from_ints(TOKENS))

    return [x for x in asyncio.run(score())[1:] if x is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_the_adapter_loads_in_peft_and_computes_what_was_trained(run: Path, tmp_path: Path) -> None:
    command(f"log_path={run / 'log'}", f"output={tmp_path / 'adapter'}")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    before = logprobs(base)
    after = logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) > 0.01
    assert after == pytest.approx(trained_logprobs(run), abs=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == TINY


def test_the_merged_model_loads_in_transformers_and_computes_what_was_trained(run: Path, tmp_path: Path) -> None:
    command(f"log_path={run / 'log'}", f"output={tmp_path / 'merged'}", "format=merged", "dtype=float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert logprobs(model) == pytest.approx(trained_logprobs(run), abs=1e-4)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 1000
    assert (tmp_path / "merged" / "README.md").is_file()


def test_the_card_says_where_the_weights_come_from(run: Path) -> None:
    path = last_sampler_path(run / "log")
    card = weights.model_card(path, TINY, "adapter", run / "log")
    assert card.startswith(f'---\nbase_model: "{TINY}"\nlibrary_name: "peft"\n')
    assert "`rl_basic`" in card and path in card and "| `learning_rate` | `0.02` |" in card
    (row,) = [line for line in card.splitlines() if line.startswith("| `test/env/all/correct` |")]
    lines = [json.loads(line) for line in (run / "log" / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0]["test/env/all/correct"], lines[-1]["test/env/all/correct"]
    assert row == f"| `test/env/all/correct` | {first:.4g} | {last:.4g} |"
    assert "time/" not in card
    assert "## Metrics" not in weights.model_card(path, TINY, "merged")


def test_an_earlier_export_is_replaced_only_when_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"log_path={run / 'log'}", f"output={tmp_path / 'adapter'}"]
    command(*argv)
    with pytest.raises(SystemExit):
        command(*argv)
    assert "overwrite=True" in capsys.readouterr().err
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"old")
    command(*argv, "overwrite=True")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 1000
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(SystemExit):
        command(argv[0], f"output={tmp_path / 'mine'}", "overwrite=True")
    assert "not an earlier export" in capsys.readouterr().err and (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to export"),
        (["model_path=tinker://x/sampler_weights/y", "dtype=float32"], "dtype='float32'"),
        (["log_path=/no/such/run"], "no such folder"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_code:
        command(*argv, f"output={tmp_path / 'out'}")
    assert exit_code.value.code == 2 and message in capsys.readouterr().err


class Hosted:
    """A service that hands out an archive as the hosted one does: by an address, perhaps with a folder inside."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create_rest_client(self) -> "Hosted":
        return self

    async def get_training_run_by_tinker_path_async(self, path: str) -> Any:
        return SimpleNamespace(base_model=TINY)

    async def get_checkpoint_archive_url_from_tinker_path(self, path: str) -> Any:
        return SimpleNamespace(url=self.url)


def write_archive(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path.as_uri()


def hosted_export(url: str, output: Path) -> weights.Exported:
    service: Any = Hosted(url)
    return asyncio.run(weights.export(service, "tinker://run/sampler_weights/final", output))


def test_an_archive_with_folders_and_strangers_gives_the_adapter_alone(tmp_path: Path) -> None:
    files = {"a/adapter_config.json": b'{"r": 4}', "a/adapter_model.safetensors": MATRICES, "../../evil.txt": b"x"}
    exported = hosted_export(write_archive(tmp_path / "archive.tar.gz", files), tmp_path / "deep" / "out")
    assert {path.name for path in exported.folder.iterdir()} == {
        *(Path(name).name for name in list(files)[:2]),
        "README.md",
    }
    assert json.loads((exported.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == TINY
    assert not list(tmp_path.rglob("evil.txt"))


def test_external_weights_are_fetched_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "c").write_text('{"r": 4}')
    (tmp_path / "w").write_bytes(MATRICES)

    class External(Hosted):
        async def get_external_weights_urls(self, path: str) -> Any:
            return SimpleNamespace(urls=urls)

    urls = {
        "a/adapter_config.json": (tmp_path / "c").as_uri(),
        "a/adapter_model.safetensors": (tmp_path / "w").as_uri(),
    }
    service: Any = External("unused:")
    path = "tinker://run/external_weights/final"
    exported = asyncio.run(weights.export(service, path, tmp_path / "out"))
    assert (exported.folder / "adapter_model.safetensors").read_bytes() == MATRICES
    del urls["a/adapter_config.json"]
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        asyncio.run(weights.export(service, path, tmp_path / "other"))


def test_a_client_that_hands_out_nothing_is_told_what_to_save(tmp_path: Path) -> None:
    class Current(Hosted):
        get_checkpoint_archive_url_from_tinker_path = property()  # type: ignore[assignment]

    service: Any = Current("")
    with pytest.raises(CheckpointError, match="save_weights_external"):
        asyncio.run(weights.export(service, "tinker://run/sampler_weights/final", tmp_path / "out"))


class FakeAge:
    """pyrage with a cipher that turns the bytes around and begins with the key."""

    class DecryptError(Exception): ...

    class x25519:
        class Identity:
            @classmethod
            def generate(cls) -> "FakeAge.x25519.Identity":
                return cls()

            def to_public(self) -> str:
                return "age1key"

    @classmethod
    def decrypt(cls, content: bytes, identities: list[Any]) -> bytes:
        if not content.startswith(b"age1key"):
            raise cls.DecryptError("no matching keys")
        return content.removeprefix(b"age1key")[::-1]


@pytest.mark.parametrize("wrong", [None, "plain", "key", "package"])
def test_a_training_checkpoint_comes_through_an_export_that_is_encrypted_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    async def done(value: Any = None) -> Any:
        return value

    said: list[Any] = []
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name, content in zip(names, (b"{}", MATRICES), strict=True):
        key = b"other" if wrong == "key" else b"age1key"
        (tmp_path / name).write_bytes(key + content[::-1])
    urls = {f"a/{name}{'' if wrong == 'plain' else '.age'}": (tmp_path / name).as_uri() for name in names}

    class Current(Hosted):
        get_checkpoint_archive_url_from_tinker_path = property()  # type: ignore[assignment]

        def get_external_weights_urls(self, path: str) -> Any:
            assert path == "tinker://new/external_weights/download"
            return done(SimpleNamespace(urls=urls))

        def delete_checkpoint_from_tinker_path(self, path: str) -> Any:
            said.append(path)
            return done()

        def create_training_client_from_state(self, path: str) -> Any:
            said.append(path)
            return done(self)

        def save_weights_external(self, name: str, **options: Any) -> Any:
            said.append(options)
            return done(SimpleNamespace(path="tinker://new/external_weights/download"))

    monkeypatch.setitem(sys.modules, "pyrage", None if wrong == "package" else FakeAge)
    service: Any = Current("")
    path = "tinker://run/weights/final"
    if wrong is None:
        exported = asyncio.run(weights.export(service, path, tmp_path / "out"))
        assert (exported.folder / "adapter_model.safetensors").read_bytes() == MATRICES
    else:
        why = {"plain": "without encryption", "key": "cannot be decrypted", "package": "needs pyrage"}[wrong]
        with pytest.raises((WeightsDownloadError, MissingPackageError), match=why):
            asyncio.run(weights.export(service, path, tmp_path / "out"))
    options = {"ttl_seconds": 3600, "age_encryption_recipients": ["age1key"]}
    assert said == ([] if wrong == "package" else [path, options, "tinker://new/external_weights/download"])


@pytest.mark.parametrize("content", [b"no archive", None])
def test_a_bad_archive_leaves_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        url = write_archive(tmp_path / "archive.tar.gz", {"adapter_config.json": b"{}"})
    else:
        (tmp_path / "archive.tar.gz").write_bytes(content)
        url = (tmp_path / "archive.tar.gz").as_uri()
    with pytest.raises(CheckpointError, match=r"damaged|has no adapter_model\.safetensors"):
        hosted_export(url, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"archive.tar.gz"}


def test_addresses_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a file nor a web address"):
        hosted_export("ftp://somewhere/x", tmp_path / "out")
    with pytest.raises(CheckpointError, match="could not be fetched"):
        hosted_export((tmp_path / "none").as_uri(), tmp_path / "out")
    with pytest.raises(ConfigurationError, match="format='gguf'"):
        asyncio.run(weights.export(Hosted(""), "tinker://x", tmp_path / "out", "gguf"))  # type: ignore[arg-type]


def test_a_download_that_breaks_off_is_no_file(tmp_path: Path) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"a part")

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(WeightsDownloadError, match="only 6 of 1000 bytes arrived"):
            hosted_export(f"http://127.0.0.1:{server.server_port}/archive", tmp_path / "out")
        thread.join()
    assert not list(tmp_path.iterdir())


class TestScripts:
    """The functions that scripts call, one after the other, none of them asynchronous."""

    @pytest.mark.slow
    def test_download_then_adapter_then_model(self, run: Path, tmp_path: Path) -> None:
        path = last_sampler_path(run / "log")
        folder = weights.download(tinker_path=path, output_dir=str(tmp_path / "downloaded"))
        weights.build_lora_adapter(base_model=TINY, adapter_path=folder, output_path=str(tmp_path / "adapter"))
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == TINY
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), str(tmp_path / "adapter"))
        assert logprobs(model) == pytest.approx(trained_logprobs(run), abs=1e-3)
        merged = str(tmp_path / "merged")
        weights.build_hf_model(base_model=TINY, adapter_path=folder, output_path=merged, dtype="float32")
        assert logprobs(AutoModelForCausalLM.from_pretrained(merged)) == pytest.approx(trained_logprobs(run), abs=1e-3)
        card = weights.ModelCardConfig(TINY, datasets=["mine"], tags=["sums"], license="mit")
        described = weights.generate_model_card(config=card, repo_id="me/sums", model_path=folder)
        assert (described.data.base_model, described.data.datasets, described.data.license) == (TINY, ["mine"], "mit")
        assert described.data.tags == ["tinker", "lora", "sums"] and described.data.library_name == "peft"
        assert "# me/sums" in described.text
        with pytest.raises(ConfigurationError, match="exists"):
            weights.build_lora_adapter(base_model=TINY, adapter_path=folder, output_path=str(tmp_path / "adapter"))

    def test_an_export_is_downloaded_in_a_notebook(self, run: Path, tmp_path: Path) -> None:
        """Whose event loop runs while this blocks."""

        async def cell() -> tuple[Path, Path]:
            state = str(newest_of_run(str(run / "log"), "state_path"))
            training: Any = await create_service_client().create_training_client_from_state(state)
            exported = (await training.save_weights_external("mine")).path
            folders = [
                weights.download(tinker_path=path, output_dir=str(tmp_path / name))
                for path, name in ((exported, "exported"), (last_sampler_path(run / "log"), "saved"))
            ]
            return Path(folders[0]), Path(folders[1])

        exported, saved = asyncio.run(cell())
        assert sorted(file.name for file in exported.iterdir()) == sorted(file.name for file in saved.iterdir())
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
            assert (exported / name).read_bytes() == (saved / name).read_bytes()

    @pytest.mark.parametrize("option", [{"quantize": "fp8"}, {"trust_remote_code": True}, {"device": "cuda"}])
    def test_what_is_not_offered_is_said(self, option: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(option))):
            weights.build_hf_model(base_model=TINY, adapter_path="a", output_path=str(tmp_path / "m"), **option)
        with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
            weights.build_lora_adapter(base_model=TINY, adapter_path=str(tmp_path), output_path=str(tmp_path / "a"))
