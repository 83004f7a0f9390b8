"""Programs written for the SDK run on the local engine as they are."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tinker

import tinker_local_backend
from tests.child import run_forked
from tests.waiting import HANG_SECONDS
from tinker_local_backend import use_local
from tinker_local_backend.run import main

PROGRAM = """
    import sys
    import tinker
    from tinker import ServiceClient, types

    service = ServiceClient(base_url="https://example.invalid", api_key="tml-nothing")
    training = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=0)
    tokens = training.get_tokenizer().encode("2 + 2 = 4")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]),
        },
    )
    backward, step = training.forward_backward([datum], "cross_entropy"), training.optim_step(types.AdamParams())
    backward.result(), step.result()
    sampler = training.save_weights_and_get_sampling_client(name="after")
    result = sampler.sample(
        prompt=types.ModelInput.from_ints(tokens), num_samples=2, sampling_params=types.SamplingParams(max_tokens=3)
    ).result()
    print("sampled", [len(sequence.tokens) for sequence in result.sequences], __name__, sys.argv[2:])
"""


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(["-m", "tinker_local_backend.run", *arguments], env=os.environ, cwd=folder)


def run_really(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinker_local_backend.run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    "as_module", [pytest.param(False, marks=pytest.mark.slow, id="script"), pytest.param(True, id="module")]
)
def test_a_program_trains_and_samples_on_the_local_engine(as_module: bool, untied_model: str, tmp_path: Path):
    script = write(tmp_path / "program.py", PROGRAM)
    name = ["-m", "program"] if as_module else [str(script)]
    start = run if as_module else run_really
    done = start([*name, untied_model, "--flag", "key=value"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "sampled [3, 3] __main__ ['--flag', 'key=value']"


def test_a_program_finds_the_modules_beside_it(tmp_path: Path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write(folder / "beside.py", "ANSWER = 42")
    write(folder / "program.py", "from beside import ANSWER; print(ANSWER)")
    assert run([str(folder / "program.py")], tmp_path).stdout == "42\n"


@pytest.mark.slow
def test_its_exit_code_and_traceback_are_its_own(tmp_path: Path):
    write(tmp_path / "program.py", "import sys; sys.exit(7)")
    assert run_really(["program.py"], tmp_path).returncode == 7
    write(tmp_path / "program.py", "from tinker_local_backend import RequestError\nraise RequestError('mine')")
    failed = run(["program.py"], tmp_path)
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr and "mine" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'; for a module use -m package.module"),
        (["-m", "no.such_module"], "there is no module 'no' on the path; for a file leave out -m"),
        (["-m", "json.such_module"], "there is no module 'json.such_module' on the path; for a file leave out -m"),
        (["-m"], "name a program"),
        (["--verbose", "x.py"], "name a program"),
    ],
)
def test_a_program_that_is_not_there_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_module_that_a_package_imports_and_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pk").mkdir()
    write(tmp_path / "pk" / "__init__.py", "import not_installed_here")
    write(tmp_path / "pk" / "prog.py", "print(1)")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["-m", "pk.prog"])
    said = capsys.readouterr().err
    assert "there is no module 'not_installed_here' on the path; 'pk.prog' imports it" in said


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_shows_both_forms(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    main(arguments)
    shown = capsys.readouterr().out
    assert "script.py key=value" in shown and "-m package.module" in shown


def test_use_local_binds_the_sdk_and_gives_it_back():
    hosted = tinker.ServiceClient
    with use_local():
        with tinker_local_backend.use_local():
            assert tinker.ServiceClient is tinker_local_backend.ServiceClient
        from tinker import RestClient, SamplingClient, TrainingClient

        assert tinker.ServiceClient is tinker_local_backend.ServiceClient
        assert SamplingClient is tinker_local_backend.SamplingClient
        assert TrainingClient is tinker_local_backend.TrainingClient
        assert RestClient is tinker_local_backend.RestClient
    assert tinker.ServiceClient is hosted
    from tinker.lib.public_interfaces.service_client import ServiceClient

    assert ServiceClient is hosted


def test_use_local_reaches_modules_that_took_the_name_before(monkeypatch: pytest.MonkeyPatch):
    hosted = tinker.ServiceClient
    monkeypatch.setattr(sys.modules[__name__], "ServiceClient", hosted, raising=False)
    with pytest.raises(ZeroDivisionError), use_local():
        assert globals()["ServiceClient"] is tinker_local_backend.ServiceClient
        _ = 1 / 0
    assert globals()["ServiceClient"] is hosted


def test_what_the_sdk_takes_to_find_a_service_is_taken_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level("INFO", logger="tinker_local_backend")
    with tinker_local_backend.ServiceClient(
        {"team": "a"},
        "project",
        base_url="https://example.invalid",
        api_key="tml-secret",
        default_headers_overrides={"x": "y"},
        home=tmp_path,
    ):
        pass
    assert "project_id, base_url, api_key, default_headers_overrides" in caplog.text
    assert "tml-secret" not in caplog.text
    with pytest.warns(FutureWarning, match="unknown arguments: timeout"):
        tinker_local_backend.ServiceClient(timeout=3, home=tmp_path).close()
