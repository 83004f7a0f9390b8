"""A merged directory is a model like any other, and computes what base model plus adapter do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.child import run_forked
from tests.engine.helpers import make_training_client, random_tokens
from tests.engine.test_checkpoints import folder, train
from tinker_local_backend import CheckpointError, RequestError, ServiceClient, merge
from tinker_local_backend.command import run
from tinker_local_backend.merge import MergeCheckError, merge_adapter

TOKENS = torch.tensor([random_tokens(20, 0)])

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0].float()


def plain(path: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


def saved_adapter(service: ServiceClient, model: str, **flags: Any) -> str:
    client = make_training_client(service, model, rank=4, **flags)
    train(client, range(2))
    return client.save_weights_for_sampler("to-merge").result().path


@pytest.mark.parametrize(
    "flags", [{}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}], ids=["all", "body", "head"]
)
@pytest.mark.parametrize("base", ["tied_model", "untied_model", "delta_model", "mamba_model"])
def test_the_merged_model_computes_what_peft_does(
    service: ServiceClient,
    home: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    base: str,
    flags: dict[str, bool],
) -> None:
    model_path = request.getfixturevalue(base)
    path = saved_adapter(service, model_path, **flags)
    result = merge_adapter(path, tmp_path / "merged", home=home)
    assert result.max_abs_diff < 1e-3 * result.max_abs_effect
    without = logits(plain(model_path))
    expected = logits(PeftModel.from_pretrained(plain(model_path), str(folder(home, path))))
    merged = plain(tmp_path / "merged")
    atol = 5e-5 if base == "delta_model" else 1e-5  # a delta rule has more rounding
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=atol)
    assert (expected - without).abs().max() > 0.01

    tied = base == "tied_model" and not flags.get("train_unembed", True)
    assert merged.config.tie_word_embeddings == tied
    before = plain(model_path).get_input_embeddings().weight
    assert torch.equal(merged.get_input_embeddings().weight, before), "the embedding of inputs must not change"
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) == (not tied)


def test_the_directory_is_complete_and_the_engine_takes_it_as_a_base_model(
    service: ServiceClient, home: Path, tmp_path: Path, tied_model: str
) -> None:
    path = saved_adapter(service, tied_model)
    merge_adapter(path, tmp_path / "merged", home=home)
    assert [p.name for p in tmp_path.iterdir() if p.name != "default-home"] == ["merged"]
    names = {p.name for p in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(str(tmp_path) in (tmp_path / "merged" / n).read_text() for n in names if n.endswith(".json"))
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "merged"), AutoTokenizer.from_pretrained(tied_model)
    messages = [{"role": "user", "content": "What is 7 * 8?"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    client = service.create_sampling_client(base_model=str(tmp_path / "merged")).result()
    assert client.get_base_model() == str(tmp_path / "merged")


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_that_peft_wrote_can_be_merged(tmp_path: Path, untied_model: str, rslora: bool) -> None:
    config = LoraConfig(
        r=3, lora_alpha=7, use_rslora=rslora, init_lora_weights=False, target_modules=["q_proj", "up_proj"]
    )
    model = get_peft_model(plain(untied_model), config)
    model.save_pretrained(str(tmp_path / "adapter"))
    expected = logits(model)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_dtype_is_the_base_models_unless_another_is_asked_for(
    service: ServiceClient, home: Path, tmp_path: Path, tied_model: str
) -> None:
    path = saved_adapter(service, tied_model)
    plain(tied_model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tied_model).save_pretrained(tmp_path / "half")
    for base, dtype, expected in (
        (tied_model, None, torch.float32),
        (tied_model, torch.bfloat16, torch.bfloat16),
        (str(tmp_path / "half"), None, torch.bfloat16),
        (str(tmp_path / "half"), torch.float32, torch.float32),
    ):
        result = merge_adapter(path, tmp_path / "merged", base, dtype, overwrite=True, home=home)
        assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {expected}
        assert plain(tmp_path / "merged").dtype == expected
        assert result.max_abs_diff < 0.1 * result.max_abs_effect


def test_a_merge_that_computes_something_else_leaves_nothing(
    service: ServiceClient,
    home: Path,
    tmp_path: Path,
    tied_model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved_adapter(service, tied_model)
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: right(self, adapter) * 1.5)
    with pytest.raises(MergeCheckError, match="in memory"):
        merge_adapter(path, tmp_path / "merged", home=home)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(home))
    with pytest.raises(SystemExit) as exit_info:
        run(merge.main, merge.Config(checkpoint=path, output=str(tmp_path / "merged")))
    assert exit_info.value.code == 1
    assert "differs from base model plus adapter" in capsys.readouterr().err
    monkeypatch.undo()

    real_load, calls = merge._load, []

    def load(name: str):
        model = real_load(name)
        calls.append(name)
        if len(calls) == 2:  # what is loaded again for the check
            model.get_output_embeddings().weight.data.zero_()
        return model

    monkeypatch.setattr(merge, "_load", load)
    with pytest.raises(MergeCheckError, match="as saved"):
        merge_adapter(path, tmp_path / "merged", home=home)
    assert list(tmp_path.glob("*merged*")) == []


def test_an_existing_directory_is_kept_unless_overwrite_replaces_a_model(
    service: ServiceClient, home: Path, tmp_path: Path, tied_model: str
) -> None:
    path = saved_adapter(service, tied_model)
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="exists; choose another directory or pass overwrite=true"):
        merge_adapter(path, output, home=home)
    with pytest.raises(RequestError, match=r"no config\.json"):
        merge_adapter(path, output, overwrite=True, home=home)
    assert (output / "notes.txt").read_text() == "mine"
    for source in (Path(tied_model), Path(tied_model).parent, folder(home, path)):
        with pytest.raises(RequestError, match="which is being read"):
            merge_adapter(path, source, overwrite=True, home=home)
    (output / "config.json").write_text("{}")
    merge_adapter(path, output, overwrite=True, home=home)
    assert not (output / "notes.txt").exists() and (output / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ({"use_dora": True}, r"lora_magnitude_vector.* has shape None in the adapter"),
        ({"peft_type": "LOHA"}, r"peft_type=.*LOHA"),
        ({"r": 5}, "does not fit the base model"),
        ({"target_modules": ["no_such_proj"]}, "does not fit the base model"),
        ("no config", r"adapter_config\.json is missing"),
        ("no weights", r"adapter_model\.safetensors is missing"),
        ("truncated", "damaged"),
        ("half", r"lora_A\.weight has shape None in the adapter"),
        ("embedding", r"embed_tokens.* None in the model"),
        ("unknown module", r"layers\.(1|9)\..*"),
        ("shape", "does not fit the base model"),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    service: ServiceClient, home: Path, tmp_path: Path, tied_model: str, fault: dict | str, match: str
) -> None:
    where = folder(home, saved_adapter(service, tied_model))
    config, weights = where / "adapter_config.json", where / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    if isinstance(fault, dict):
        config.write_text(json.dumps({**json.loads(config.read_text()), **fault}))
    elif fault == "no config":
        config.unlink()
    elif fault == "no weights":
        weights.unlink()
    elif fault == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        if fault == "half":
            del tensors[first]
        elif fault == "embedding":
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(2, 2)
        elif fault == "unknown module":
            tensors = {name.replace("layers.1", "layers.9"): tensor for name, tensor in tensors.items()}
        elif fault == "shape":
            tensors[first] = tensors[first][:, :-1].contiguous()
        save_file(tensors, weights)
    with pytest.raises(CheckpointError, match=match):
        merge_adapter(str(where), tmp_path / "merged")
    assert list(tmp_path.glob("*merged*")) == []


@pytest.mark.slow
def test_the_command_line(service: ServiceClient, home: Path, tmp_path: Path, tied_model: str) -> None:
    path = saved_adapter(service, tied_model)
    words = [
        "-m",
        "tinker_local_backend.merge",
        f"checkpoint={path}",
        f"output={tmp_path / 'merged'}",
        "dtype=bfloat16",
    ]
    env = {**os.environ, "TINKER_LOCAL_HOME": str(home), "OMP_NUM_THREADS": "1"}
    first = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "max_abs_diff=" in first.stdout and first.stdout.splitlines()[-1] == "ok"
    second = run_forked(words, env=env)
    assert second.returncode == 2
    assert "error: output" in second.stderr and "Traceback" not in second.stderr


def test_a_dtype_must_be_known() -> None:
    with pytest.raises(RequestError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        merge.main(merge.Config(checkpoint="x", output="y", dtype="int8"))
