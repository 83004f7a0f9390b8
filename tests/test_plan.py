"""`python -m tinker_local_backend.plan`: what fits on which card, by name, folder or hub id, without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinker_local_backend.command import parse, run
from tinker_local_backend.engine.model.memory_plan import of_card
from tinker_local_backend.errors import ModelLoadError
from tinker_local_backend.plan import Config, config_of, in_columns, main, size_of


@pytest.mark.parametrize("name", ["qwen3-4b", "Qwen3-4B", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"])
def test_a_released_model_is_known_by_its_name(name: str) -> None:
    assert config_of(name).hidden_size == 2560


def test_a_folder_is_read_without_its_weights(tmp_path: Path) -> None:
    config_of("qwen3-0.6b").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert size_of(str(tmp_path), 32) == size_of("qwen3-0.6b", 32)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"model='qwen3-4bb' is not a directory.*some known names are qwen3-4b"):
        config_of("qwen3-4bb")


def test_a_model_that_the_engine_refuses_is_refused(tmp_path: Path) -> None:
    config_of("qwen3-0.6b").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        size_of(str(tmp_path), 32)


def test_the_table_has_the_numbers_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(Config(model="qwen3-8b", gpu_gib=(16.0, 24.0, 80.0), rank=16))
    said = capsys.readouterr().out
    plans = {gib: of_card(gib, size_of("qwen3-8b", 16)) for gib in (16, 24, 80)}
    lines = {line.split()[0]: line for line in reversed(said.splitlines()) if line.strip()}
    assert f"{plans[16].missing / 2**30:.1f} GiB are missing" in lines["16"]
    assert plans[24].recomputes and not plans[80].recomputes
    assert lines["24"].split() == [
        *("24", f"{plans[24].kv_tokens:,}", *(f"{plans[24].rows(n):,}" for n in (1024, 4096, 16384))),
        *(f"{plans[24].pass_tokens:,}", "recomputed", f"{plans[24].longest_tokens:,}"),
    ]
    assert f"{plans[80].pass_tokens:,}  " in lines["80"] and "15.3 GiB of weights (bfloat16)" in said


def test_fewer_bits_leave_more_room() -> None:
    plain, packed = size_of("qwen3-8b", 32), size_of("qwen3-8b", 32, quantization="nf4")
    assert packed.weights < plain.weights / 2 and packed.largest > plain.largest == 0
    assert of_card(24, packed).longest_tokens > of_card(24, plain).longest_tokens


def test_rows_with_one_wide_cell_widen_no_column() -> None:
    text = in_columns([["a", "b", "c"], ["1", "a long remark about this"], ["22", "3", "4"]])
    assert text.splitlines() == [" a  b  c", " 1  a long remark about this", "22  3  4"]


def test_as_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        command = [sys.executable, "-m", "tinker_local_backend.plan", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    text = shown("model=qwen3-0.6b", "gpu_gib=24,80")
    assert "tokens in a pass" in text and "GiB of each share" in text
    text = shown("--help")
    assert "longest datum: tokens" in text and "gpu_gib" in text and "snapshots (sampled from)" in text

    monkeypatch.setattr(sys, "argv", ["plan", "model=qwen3-0.6b", "gpu_gib=0"])
    with pytest.raises(SystemExit) as ended:
        run(main, parse(Config))
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: gpu_gib must be numbers above 0, got 0.0\n")
