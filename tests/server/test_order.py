"""Requests as they come over a bad network: twice, out of order, too late, about what has ended."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_sample_response

from tests.server.serving import Serving, Wire, forward_backward_body
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def wire(server: Serving) -> Wire:
    return Wire(server.url)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that gives up after seconds."""
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    limits: dict[str, Any] = {
        "request_gap_seconds": 2.0,
        "poll_seconds": 0.5,
        "result_seconds": 0.5,
        "body_seconds": 1.0,
    }
    with Serving(tmp_path_factory.mktemp("impatient-home"), **limits) as serving:
        yield serving


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that takes little."""
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    limits: dict[str, Any] = {
        "max_training_requests": 3,
        "max_sessions": 4,
        "max_models": 2,
        "max_snapshots": 2,
        "max_rank": 8,
        "max_sequence_tokens": 400,
        "max_results_mib": 1,
        "max_body_mib": 1,
        "max_decompressed_mib": 2,
    }
    with Serving(tmp_path_factory.mktemp("small-home"), **limits) as serving:
        yield serving


def loss_of(result: Any) -> float:
    assert isinstance(result, bytes), result
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(result)
    return message.metrics["loss:sum"]


def test_requests_run_in_the_order_of_their_numbers(wire: Wire) -> None:
    """Sent last to first: a forward pass sees the step before it and not the one after it."""
    session = wire.session()
    ordered, shuffled = wire.model(session, 0), wire.model(session, 1)
    calls = {1: "forward_backward", 2: "optim_step", 3: "forward_backward", 4: "optim_step", 5: "forward_backward"}

    def losses(model: str, numbers: list[int]) -> list[float]:
        accepted = {}
        for number in numbers:
            more = {"learning_rate": 1e-2} if calls[number] == "optim_step" else {}
            status, accepted[number] = getattr(wire, calls[number])(model, number, **more)
            assert status == 200
        return [loss_of(wire.result(accepted[number])) for number in (1, 3, 5)]

    expected = losses(ordered, [1, 2, 3, 4, 5])
    assert len(set(expected)) == 3
    assert losses(shuffled, [5, 3, 4, 2, 1]) == pytest.approx(expected, rel=1e-6)


def test_a_request_that_is_sent_again_is_the_same_request(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    first, again = wire.forward_backward(model, 1), wire.forward_backward(model, 1)
    assert first == again and first[0] == 200
    steps = [wire.optim_step(model, 2) for _ in range(2)]
    assert steps[0] == steps[1]
    assert wire.result(steps[0][1]) == wire.result(steps[0][1])  # a lost reply can be fetched again
    status, reply = wire.optim_step(model, 2, learning_rate=0.5)
    assert status == 400 and "seq_id 2 was used by another request" in reply["detail"]
    status, reply = wire.post("/save_weights", model_id=model, seq_id=2, path="x")
    assert status == 400
    assert wire.model(session) == model
    status, reply = wire.post(
        "/create_model", session_id=session, model_seq_id=0, base_model=_base(wire), lora_config={"rank": 3}
    )
    assert status == 400 and "model_seq_id 0 was used" in reply["detail"]


def _base(wire: Wire) -> str:
    return wire.ask("GET", "/get_server_capabilities")[1]["supported_models"][0]["model_name"]


def test_a_snapshot_that_is_asked_for_again_is_the_same(wire: Wire) -> None:
    """The SDK counts the number of the sampling session up with every attempt."""
    session = wire.session()
    model = wire.model(session)
    attempts = [
        wire.post("/save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=n, kind="snapshot")
        for n in (0, 1)
    ]
    assert attempts[0] == attempts[1]
    sampler = wire.result(attempts[0][1])["sampling_session_id"]
    assert sampler == f"{session}:sample:0"
    assert wire.sample(sampler)[0] == 200


def test_what_is_never_carried_out_holds_up_nothing(wire: Wire) -> None:
    """It is refused in its turn: a number that never arrived would keep the model's later requests waiting."""
    session = wire.session()
    model = wire.model(session)
    refused = [
        wire.post("/optim_step", model_id=model, seq_id=1, optimizer_params={"type": "dimuon"}),
        wire.post("/save_weights_external", model_id=model, seq_id=2, path="x", age_encryption_recipients=["x"]),
        wire.post("/save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0, kind="live"),
        wire.post("/load_weights", model_id=model, seq_id=4, path="x", optimizer=True, weights_access_token="t"),
    ]
    for (status, accepted), reason in zip(
        refused, ("AdamW", "public key", "snapshot or inflight", "hosted"), strict=True
    ):
        assert status == 200 and reason in wire.result(accepted)["error"]
    assert loss_of(wire.result(wire.forward_backward(model, 5)[1])) > 0


def test_routes_of_the_hosted_service_alone_say_why(wire: Wire) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    from tinker_local_backend.server.routes_service import HOSTED_ONLY

    for method, path, why in HOSTED_ONLY:
        path = path.format(session_id="x", run_id="x", kind="weights", name="x")
        assert wire.ask(method, path, json={}) == (400, {"detail": why})


def test_samples_are_known_by_their_number_and_sessions_by_their_key(wire: Wire) -> None:
    sampler = wire.sampler(wire.session())
    first, again, other = (
        wire.sample(sampler, 0, seed=1),
        wire.sample(sampler, 0, seed=1),
        wire.sample(sampler, 1, seed=1),
    )
    assert first == again and first[1]["request_id"] != other[1]["request_id"]
    assert wire.result(first[1]) == wire.result(again[1])
    same_seed = [deserialize_sample_response(wire.result(reply[1])).sequences[0] for reply in (first, other)]
    assert same_seed[0].tokens == same_seed[1].tokens
    assert same_seed[0].logprobs == pytest.approx(same_seed[1].logprobs, abs=1e-5)
    sessions = {
        wire.ask("POST", "/create_session", json={}, headers={"X-Idempotency-Key": key})[1]["session_id"]
        for key in ("a", "a", "b")
    }
    assert len(sessions) == 2


def test_a_request_may_be_cancelled(wire: Wire) -> None:
    sampler = wire.sampler(wire.session())
    _, accepted = wire.sample(sampler, max_tokens=900)
    status, _ = wire.post("/cancel_future", request_id=accepted["request_id"])
    assert status == 204
    assert wire.result(accepted) == {"error": "the request was cancelled", "category": "user"}


def test_an_unknown_or_ended_thing_is_told_at_once(wire: Wire) -> None:
    session = wire.session()
    model, sampler = wire.model(session), wire.sampler(session)
    assert wire.ask("POST", f"/sessions/{session}/finish", json={"reason": {"type": "success"}})[0] == 204
    assert wire.post("/session_heartbeat", session_id=session)[0] == 410
    for status, reply in (
        wire.optim_step(model, 1),
        wire.forward_backward(model, 1),
        wire.sample(sampler),
        wire.post("/get_info", model_id=model),
        wire.post("/create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=_base(wire)),
    ):
        assert status == 404 and "continue from a saved checkpoint" in reply["detail"]
    assert wire.result({"request_id": "never"})["category"] == "user"


def test_a_gap_ends_in_an_error_and_the_model_goes_on(impatient: Serving) -> None:
    wire = Wire(impatient.url)
    session = wire.session()
    model = wire.model(session)
    held = [wire.forward_backward(model, 2)[1], wire.optim_step(model, 3)[1]]
    for accepted in held:
        assert "request 1 of model" in wire.result(accepted)["error"]
    assert loss_of(wire.result(wire.forward_backward(model, 4)[1])) > 0
    wire.post(f"/sessions/{session}/finish")


@contextmanager
def kept_alive(serving: Serving, session: str) -> Iterator[None]:
    """Heartbeats of a session, until the body ends."""
    ended = threading.Event()

    def beat() -> None:
        wire = Wire(serving.url)
        while not ended.wait(0.1):
            wire.post("/session_heartbeat", session_id=session)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_limits_of_a_tenant(small: Serving) -> None:
    wire = Wire(small.url)
    sessions = [wire.session() for _ in range(4)]
    status, reply = wire.post("/create_session")
    assert status == 403 and "max_sessions" in reply["detail"]
    for number in range(2):
        wire.model(sessions[0], number)
    with kept_alive(small, sessions[0]):
        status, reply = wire.post(
            "/create_model", session_id=sessions[1], model_seq_id=0, base_model=_base(wire), lora_config={"rank": 2}
        )
    assert status == 403 and "max_models" in reply["detail"]
    status, reply = wire.post(
        "/create_model", session_id=sessions[1], model_seq_id=0, base_model=_base(wire), lora_config={"rank": 9}
    )
    assert status == 400 and "at most 8" in reply["detail"]
    model = f"{sessions[0]}:train:0"
    for seq_id in (2, 3, 4):
        assert wire.optim_step(model, seq_id)[0] == 200
    status, reply = wire.optim_step(model, 5)
    assert status == 400 and "max_training_requests" in reply["detail"]
    for session in sessions:
        wire.post(f"/sessions/{session}/finish")


def test_a_sequence_that_is_too_long(small: Serving) -> None:
    wire = Wire(small.url)
    assert wire.ask("GET", "/get_server_capabilities")[1]["supported_models"][0]["max_context_length"] == 400
    session = wire.session()
    model, sampler = wire.model(session), wire.sampler(session)
    for accepted in (wire.forward_backward(model, 1, length=401)[1], wire.sample(sampler, 0, max_tokens=398)[1]):
        assert "exceeds the context length 400" in wire.result(accepted)["error"]
    for accepted in (wire.forward_backward(model, 2, length=400)[1], wire.sample(sampler, 1, max_tokens=397)[1]):
        assert isinstance(wire.result(accepted), bytes)
    wire.post(f"/sessions/{session}/finish")


def test_a_model_that_is_unloaded_makes_room(small: Serving) -> None:
    """A request of older SDKs. What the model waits for fails; sent again, the request is the same."""
    wire = Wire(small.url)
    session = wire.session()
    models = [wire.model(session, number) for number in range(2)]
    _, held = wire.optim_step(models[0], 2)
    headers = {"X-Idempotency-Key": "unload"}
    replies = [wire.ask("POST", "/unload_model", json={"model_id": models[0]}, headers=headers)[1] for _ in range(2)]
    assert replies[0] == replies[1]
    assert wire.result(replies[0]) == {"type": "unload_model", "model_id": models[0]}
    assert "was unloaded" in wire.result(held)["error"]
    assert wire.optim_step(models[0], 3)[0] == 404
    wire.model(session, 2)
    assert loss_of(wire.result(wire.forward_backward(models[1], 1)[1])) > 0
    wire.post(f"/sessions/{session}/finish")


def test_the_snapshot_used_least_recently_goes_first(small: Serving) -> None:
    wire = Wire(small.url)
    session = wire.session()
    model = wire.model(session)
    for number in range(2):
        _, accepted = wire.post(
            "/save_weights_for_sampler", model_id=model, seq_id=1 + number, sampling_session_seq_id=number
        )
        wire.result(accepted)
    samplers = [f"{session}:sample:{number}" for number in range(3)]
    assert isinstance(wire.result(wire.sample(samplers[0])[1]), bytes)
    _, accepted = wire.post("/save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=2)
    wire.result(accepted)
    status, reply = wire.sample(samplers[1])
    assert status == 404 and "max_snapshots" in reply["detail"]
    for kept in (samplers[0], samplers[2]):
        assert isinstance(wire.result(wire.sample(kept, 1)[1]), bytes)
    wire.post(f"/sessions/{session}/finish")


def test_a_fetched_result_is_forgotten_after_a_while(impatient: Serving) -> None:
    wire = Wire(impatient.url)
    session = wire.session()
    _, accepted = wire.sample(wire.sampler(session))
    assert isinstance(wire.result(accepted), bytes)
    assert "fetched some time ago" in wait_until_forgotten(wire, session, accepted)
    wire.post(f"/sessions/{session}/finish")


def test_results_that_nobody_fetches_make_room(small: Serving) -> None:
    """Seven tokens with their 400 likeliest alternatives, 64 times, are over a mebibyte."""
    wire = Wire(small.url)
    session = wire.session()
    sampler = wire.sampler(session)

    def large(seq_id: int) -> Any:
        return wire.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            num_samples=64,
            topk_sample_logprobs=400,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": 7, "stop": []},
        )[1]

    first = large(0)
    while wire.post("/retrieve_future", request_id=first["request_id"])[0] == 408:
        pass
    assert "evicted by later ones" in wait_until_forgotten(wire, session, first)
    assert isinstance(wire.result(wire.sample(sampler, 1)[1]), bytes)
    wire.post(f"/sessions/{session}/finish")


def wait_until_forgotten(wire: Wire, session: str, accepted: dict[str, Any]) -> str:
    while isinstance(reply := wire.result(accepted), bytes):
        wire.post("/session_heartbeat", session_id=session)
    return reply["error"]


def test_bodies_that_are_too_large_or_bombs(small: Serving) -> None:
    wire = Wire(small.url)
    proto = {"Content-Type": "application/x-protobuf"}
    status, reply = wire.ask("POST", "/forward_backward", content=b"x" * (2 << 20), headers=proto)
    assert status == 413 and "max_body_mib" in reply["detail"]
    status, reply = wire.ask("POST", "/forward_backward", content=iter([b"x" * (1 << 20)] * 3), headers=proto)
    assert status == 413
    bomb = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    assert len(bomb) < 1 << 20
    packed = {**proto, "Content-Encoding": "zstd"}
    status, reply = wire.ask("POST", "/forward_backward", content=bomb, headers=packed)
    assert status == 413 and "max_decompressed_mib" in reply["detail"]
    assert wire.ask("POST", "/forward_backward", content=b"no zstd", headers=packed)[0] == 400
    assert wire.ask("POST", "/forward_backward", content=b"", headers={"Content-Encoding": "br"})[0] == 415


def test_bodies_that_are_too_slow(impatient: Serving) -> None:
    host, port = impatient.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as slow:
        slow.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: k\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b"400" in slow.recv(100)
    for beginning in (b"", b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as silent:
            silent.sendall(beginning)
            assert silent.recv(100) == b""


def test_metrics_count_what_happens(server: Serving, wire: Wire) -> None:
    def numbers() -> dict[str, float]:
        lines = wire.ask("GET", f"{server.url}/metrics")[1].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = numbers()
    session = wire.session()
    model, sampler = wire.model(session), wire.sampler(session)
    wire.result(wire.forward_backward(model, 1, length=6)[1])
    wire.result(wire.optim_step(model, 2)[1])
    assert "error" in wire.result(wire.optim_step(model, 3)[1])
    wire.result(wire.sample(sampler, max_tokens=4)[1])
    after = numbers()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown['tinker_tokens_total{kind="forward_backward"}'] == 6
    assert grown['tinker_tokens_total{kind="sample"}'] == 4
    assert grown['tinker_operations_total{kind="optim_step",outcome="ok"}'] == 1
    assert grown['tinker_operations_total{kind="optim_step",outcome="user"}'] == 1
    assert grown['tinker_operation_seconds_count{kind="sample"}'] == 1
    assert grown['tinker_http_requests_total{route="/api/v1/optim_step",status="200"}'] == 2
    assert (grown["tinker_live_sessions"], grown["tinker_live_models"], grown["tinker_live_samplers"]) == (1, 1, 1)
    assert after["tinker_live_requests"] == 0


def test_compressed_bodies_are_read(wire: Wire) -> None:
    model = wire.model(wire.session())
    body = zstandard.ZstdCompressor().compress(forward_backward_body(model, 1))
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    status, accepted = wire.ask("POST", "/forward_backward", content=body, headers=headers)
    assert status == 200 and loss_of(wire.result(accepted)) > 0


def test_min_p_of_a_body_reaches_the_sampler(wire: Wire) -> None:
    """The SDK's class has no such field. Of 1 the likeliest token is left."""
    sampler = wire.sampler(wire.session())
    fields = ({"temperature": 0.0}, {"temperature": 1.5, "min_p": 1.0}, {"temperature": 1.5})
    accepted = [wire.sample(sampler, i, seed=4, **given)[1] for i, given in enumerate(fields)]  # pyright: ignore[reportArgumentType]
    likeliest, at_most, free = (pb.SampleResponse.FromString(wire.result(one)).sequences[0].tokens for one in accepted)
    assert at_most == likeliest != free
    refused = wire.result(wire.sample(sampler, 3, min_p=1.5)[1])
    assert "min_p must be in [0, 1], got 1.5" in refused["error"]


def test_a_sampling_field_that_would_be_ignored_is_refused_by_name(wire: Wire) -> None:
    """The SDK's own class drops it without a word; a body made by hand gets here."""
    sampler = wire.sampler(wire.session())
    status, reply = wire.sample(sampler, typical_p=0.1)
    assert status == 422 and "typical_p=0.1 is not supported" in str(reply)
    status, reply = wire.sample(sampler, min_p=None, later_sdks_field=None)
    assert status == 200, reply
