"""The conformance checks: our server passes them, and a server that is wrong in one way is caught by the check of that."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker.proto import tinker_public_pb2 as pb

from tests.child import ROOT, python_path, run_forked
from tests.server.altering import Exchange, Fault, altered
from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.waiting import HANG_SECONDS, until
from tinker_local_backend.conformance import harness
from tinker_local_backend.conformance.__main__ import CHECKS, Config, chosen, target
from tinker_local_backend.conformance.harness import Check, NonconformingError, Row
from tinker_local_backend.conformance.probe import Probe, Target

NOWHERE = Target("http://127.0.0.1:9", KEY, "none")
BY_NAME = {check.name: check for check in CHECKS}
REFUSED_HERE = {"whoami"}
"""Checks whose subject our server refuses: there are no tokens that name a caller."""


def outcomes(ask: Callable[[Probe], None], seconds: float = HANG_SECONDS) -> Row:
    (row,) = harness.run([Check(ask)], NOWHERE, seconds)
    return row


class TestHarness:
    def test_what_a_check_raises_decides(self) -> None:
        def status(code: int) -> tinker.APIStatusError:
            import httpx

            response = httpx.Response(code, request=httpx.Request("POST", "http://x"))
            return tinker.APIStatusError("why", response=response, body=None)

        def asks(error: Exception, wrapped: bool) -> Callable[[Probe], None]:
            def call() -> None:
                raise error

            return lambda probe: harness.offered(call) if wrapped else call()

        failed_request = tinker.RequestFailedError("no such thing", "1", "user")  # pyright: ignore[reportArgumentType]
        errors: list[tuple[Exception, bool, str]] = [
            (status(404), True, "refused"),
            (status(404), False, "failed"),
            (status(500), True, "failed"),
            (failed_request, True, "refused"),
            (failed_request, False, "failed"),
            (NonconformingError("3 is not 4"), True, "failed"),
            (AssertionError(), True, "failed"),
        ]
        for error, wrapped, outcome in errors:
            row = outcomes(asks(error, wrapped))
            assert (row.outcome, bool(row.reason)) == (outcome, True), (error, wrapped)
        assert outcomes(lambda probe: None).outcome == "passed"

    def test_a_check_without_an_end_is_left_behind(self) -> None:
        row = outcomes(lambda probe: until(lambda: False), seconds=0.05)
        assert (row.outcome, row.reason) == ("failed", "no result within 0.05 s")

    def test_numbers_must_be_near_and_of_one_shape(self) -> None:
        harness.expect_close([1.0, 2.0], [1.0, 2.001], "x", atol=0.01)
        for found in ([1.0, 2.2], [1.0, float("nan")], [1.0]):
            with pytest.raises(NonconformingError, match="x:"):
                harness.expect_close(found, [1.0, 2.0], "x", atol=0.01)

    def test_an_error_must_be_of_the_right_class(self) -> None:
        def wrong() -> None:
            raise ValueError("some text")

        assert harness.expect_refusal(wrong, "x", ValueError) == "some text"
        for call, why in ((wrong, "expected a refusal"), (lambda: None, "was accepted")):
            with pytest.raises(NonconformingError, match=why):
                harness.expect_refusal(call, "x")

    def test_checks_are_chosen_by_parts_of_names(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert [check.name for check in chosen(["seeds_of", "dro"])] == ["seeds_of_adapters", "dro"]
        with pytest.raises(SystemExit):
            chosen(["nonsense"])
        assert "no check is named 'nonsense'" in capsys.readouterr().err


def test_checks_are_described_and_named_once() -> None:
    assert len(BY_NAME) == len(CHECKS) and all(check.description.endswith(".") for check in CHECKS)


def test_the_page_lists_every_check() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs" / "conformance.md").read_text(), re.MULTILINE)
    assert rows == [(check.name, check.description) for check in CHECKS]


# Faults


def sampled(change: Callable[[Any], object]) -> Fault:
    """Results of sampling are changed."""

    def coming(exchange: Exchange) -> None:
        if exchange.kind == "asample" and exchange.status == 200 and "protobuf" in exchange.content_type:
            exchange.alter_message(pb.SampleResponse, change)

    return Fault(coming=coming)


def trained(change: Callable[[Any], object]) -> Fault:
    """Results of forward and forward_backward are changed."""

    def coming(exchange: Exchange) -> None:
        if exchange.kind == "forward_backward" and exchange.status == 200 and "protobuf" in exchange.content_type:
            exchange.alter_message(pb.ForwardBackwardOutput, change)

    return Fault(coming=coming)


def sent(route: str, change: Callable[[dict[str, Any]], object]) -> Fault:
    """Requests to a route are changed before the server sees them."""
    return Fault(going=lambda exchange: exchange.alter_body(change) if exchange.path == route else None)


def replied(part: str, change: Callable[[dict[str, Any]], object]) -> Fault:
    """JSON replies of routes that contain `part` are changed."""

    def coming(exchange: Exchange) -> None:
        if part in exchange.path and exchange.status == 200 and exchange.content_type.startswith("application/json"):
            exchange.alter_reply(change)

    return Fault(coming=coming)


def lowered(data: bytes) -> bytes:
    return (np.frombuffer(data, np.float32) - 0.2).tobytes()


def lower_samples(message: Any) -> None:
    for sequence in message.sequences:
        sequence.logprobs = lowered(sequence.logprobs)


def lower_outputs(message: Any) -> None:
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        tensor.data = lowered(tensor.data)


def shift_prompt_logprobs(message: Any) -> None:
    values = np.frombuffer(message.prompt_logprobs, np.float32)
    message.prompt_logprobs = np.roll(values, -1).tobytes()


def average_loss(message: Any) -> None:
    message.metrics["loss:sum"] /= 8


def as_500(exchange: Exchange) -> None:
    if exchange.status == 404:
        exchange.status = 500


def is_put_or_delete(exchange: Exchange) -> bool:
    return exchange.method in ("PUT", "DELETE")


QUICK: dict[str, tuple[Fault, list[str]]] = {
    "sampled logprobs are off": (sampled(lower_samples), ["sampler_and_trainer"]),
    "the seed is ignored": (sent("/asample", lambda body: body["sampling_params"].pop("seed", None)), ["seeds"]),
    "checkpoints are lost": (replied("/checkpoints", lambda reply: reply["checkpoints"].clear()), ["checkpoints"]),
    "losses are means": (trained(average_loss), ["cross_entropy", "ppo"]),
}
MORE: dict[str, tuple[Fault, list[str]]] = {
    "the trainer's logprobs are off": (trained(lower_outputs), ["forward", "importance_sampling", "dro"]),
    "prompt logprobs are shifted": (sampled(shift_prompt_logprobs), ["compute_logprobs", "prompt_logprobs"]),
    "no step is taken": (
        sent("/optim_step", lambda body: body["adam_params"].update(learning_rate=0.0)),
        ["optim_step", "gradients_accumulate", "trained_weights_are_sampled"],
    ),
    "the adapter's seed is ignored": (
        sent("/create_model", lambda body: body["lora_config"].pop("seed", None)),
        ["seeds_of_adapters"],
    ),
    "the rank is ignored": (
        sent("/create_model", lambda body: body["lora_config"].update(rank=4)),
        ["create_lora_client", "training_runs", "archive", "external_weights"],
    ),
    "the optimizer is not loaded": (
        sent("/load_weights", lambda body: body.update(optimizer=False)),
        ["saved_state_with_optimizer", "load_state"],
    ),
    "the optimizer is loaded unasked": (
        sent("/load_weights", lambda body: body.update(optimizer=True)),
        ["saved_state"],
    ),
    "stops are ignored": (
        sent("/asample", lambda body: body["sampling_params"].update(stop=[])),
        ["stop_ids", "stop_strings"],
    ),
    "one sample is drawn": (sent("/asample", lambda body: body.update(num_samples=1)), ["num_samples"]),
    "the temperature is ignored": (
        sent("/asample", lambda body: body["sampling_params"].update(temperature=1.0)),
        ["greedy"],
    ),
    "a ttl has no effect": (Fault(swallows=is_put_or_delete), ["time_to_live", "deletion", "publishing"]),
    "sessions forget their runs": (
        replied("/sessions/", lambda reply: reply["training_run_ids"].clear()),
        ["sessions"],
    ),
    "what is missing is an internal error": (Fault(coming=as_500), ["unknown_run", "unknown_checkpoint"]),
}


def rows_of(server: Serving, fault: Fault, names: list[str], seconds: float | None = None) -> dict[str, Row]:
    with altered(server.url, fault) as url:
        wrong = Target(url, KEY, TINY_CHAT, tolerance=1e-3)
        return {row.name: row for row in harness.run([BY_NAME[name] for name in names], wrong, seconds)}


def assert_caught(server: Serving, fault: Fault, names: list[str]) -> None:
    # An internal error is repeated for minutes.
    rows = rows_of(server, fault, names, 5.0 if fault.coming is as_500 else None)
    assert {name: row.outcome for name, row in rows.items()} == dict.fromkeys(names, "failed"), rows


@pytest.mark.parametrize("what", QUICK)
def test_a_wrong_server_is_caught(server: Serving, what: str) -> None:
    assert_caught(server, *QUICK[what])


def test_the_proxy_itself_changes_nothing(server: Serving) -> None:
    names = [name for _, caught in QUICK.values() for name in caught]
    assert {row.outcome for row in rows_of(server, Fault(), names).values()} == {"passed"}


@pytest.mark.server
@pytest.mark.parametrize("what", MORE)
def test_further_wrong_servers_are_caught(server: Serving, what: str) -> None:
    assert_caught(server, *MORE[what])


@pytest.mark.server
def test_without_the_faults_all_of_these_pass(server: Serving) -> None:
    names = sorted({name for _, caught in MORE.values() for name in caught})
    assert {row.outcome for row in rows_of(server, Fault(), names).values()} == {"passed"}


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environment}
    line = [sys.executable, "-m", "tinker_local_backend.conformance", *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.server
def test_our_server_passes_whole(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = command(f"base_url={server.url}/", f"api_key={KEY}", "tolerance=0.001", f"json={file}")
    rows = [Row(**row) for row in json.loads(file.read_text())]
    assert [row for row in rows if row.outcome == "failed"] == [] and done.returncode == 0, done.stdout + done.stderr
    assert [row.name for row in rows] == [check.name for check in CHECKS]
    assert {row.name for row in rows if row.outcome == "refused"} == REFUSED_HERE
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{server.url}, model {TINY_CHAT}, SDK {tinker.__version__}")
    assert lines[-1] == f"{len(CHECKS) - len(REFUSED_HERE)} passed, 0 failed, {len(REFUSED_HERE)} refused"
    assert any(line.startswith("refused") and "whoami requires JWT" in line for line in lines)


@pytest.mark.server
def test_the_command_fails_where_a_check_does(server: Serving) -> None:
    fault, names = QUICK["losses are means"]
    with altered(server.url, fault) as url:
        done = command(f"base_url={url}", f"api_key={KEY}", f"checks={names[0]}", f"model={TINY_CHAT}")
    assert done.returncode == 1 and "loss:sum" in done.stdout, done.stdout + done.stderr
    nobody = command("base_url=http://127.0.0.1:9", "model=any", "checks=capabilities", "seconds=2")
    assert nobody.returncode == 1 and "failed" in nobody.stdout, nobody.stdout + nobody.stderr


@pytest.mark.server
def test_the_key_must_be_the_servers(server: Serving) -> None:
    row = next(harness.run([BY_NAME["forward"]], Target(server.url, "tml-unknown-key", TINY_CHAT)))
    assert row.outcome == "failed" and "401" in row.reason


def test_help_explains_the_keys() -> None:
    done = run_forked(["-m", "tinker_local_backend.conformance", "--help"], env=dict(os.environ))
    assert "the server's address" in done.stdout and "largest mean difference" in done.stdout


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    with pytest.raises(SystemExit) as end:
        target(Config(model="any"))
    assert end.value.code == 2 and "base_url is not set" in capsys.readouterr().err
