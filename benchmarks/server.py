"""What the server costs: the SDK over loopback, compared with the engine in process and with a server that computes nothing.

python -m benchmarks.server
python -m benchmarks.server stub=path/to/stub.py
"""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chz
import httpx
import numpy as np
import tinker

from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.harness import Contender, absent, measure
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import LocalEngine
from benchmarks.peers.registry import select
from benchmarks.report import Report, Table, finish, number
from benchmarks.serving import KEY, ServerProcess, our_server, stub_server
from benchmarks.workload import random_tokens

DATUMS, DATUM_TOKENS = 8, 64
REQUESTS, SAMPLES, SAMPLE_TOKENS = 8, 4, 64
CROWD_TOKENS = 8
"""tokens that each of the concurrent requests samples"""


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.server`. The stub is its only peer."""

    # client and HTTP need the other core
    threads: int = chz.field(default=1, doc="CPU threads of every contender", validator=chz.validators.gt(0))
    stub: str | None = chz.field(
        default=None, doc="script of a server that computes nothing, started as `python SCRIPT PORT`; default: none"
    )
    steps: int = chz.field(default=100, doc="training steps of a repetition", validator=chz.validators.gt(0))
    ahead: int = chz.field(
        default=8, doc="training steps submitted before waiting for the first of them", validator=chz.validators.gt(0)
    )
    sampling_rounds: int = chz.field(
        default=5, doc="times that a repetition runs the sampling workload", validator=chz.validators.gt(0)
    )
    pollers: int = chz.field(
        default=200, doc="clients that hold a long poll while nothing happens", validator=chz.validators.gt(0)
    )
    poll_seconds: float = chz.field(
        default=35.0,
        doc="seconds that they hold it; the server answers each after 30 s",
        validator=chz.validators.gt(0),
    )
    crowd: int = chz.field(default=1000, doc="sampling requests sent at the same time", validator=chz.validators.gt(0))


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    select(config, {})
    shape = SHAPES[config.shape]
    with environment(config), ExitStack() as stack:
        report = Report.start("server", config)
        model = ensure_model(config.shape, shape, config.models_dir)
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinker-benchmark-")))
        server = stack.enter_context(our_server(model, home, config.threads))
        engine = stack.enter_context(LocalEngine(model, config.rank))
        sdk = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        served = sdk.create_lora_training_client(str(model), rank=config.rank, seed=0, train_unembed=False).result()
        _compare_training(report, config, stack, model, {"ours, served": served, "in process": engine.training})
        samplers = {
            "ours, served": sdk.create_sampling_client(base_model=str(model)).result(),
            "in process": engine.base_sampler(),
        }
        _compare_sampling(report, config, samplers)
        report.tables.append(_idle(config, server, served))
        report.tables.append(_crowd(config, server, samplers["ours, served"], model))
    return report


def _compare_training(report: Report, config: Config, stack: ExitStack, model: Path, clients: dict[str, Any]) -> None:
    vocabulary = SHAPES[config.shape].vocab
    data = [datum(random_tokens(vocabulary, DATUM_TOKENS + 1, seed)) for seed in range(DATUMS)]
    missing = []
    if config.stub is None:
        missing.append(absent("the stub, which computes nothing", "not measured (stub=SCRIPT)"))
    else:
        stub = stack.enter_context(stub_server(config.stub, model))
        sdk = tinker.ServiceClient(base_url=stub.url, api_key=KEY)
        clients["the stub, which computes nothing"] = sdk.create_lora_training_client(str(model), rank=8).result()
    contenders = [
        Contender(
            name, lambda _, client=client: train(client, data, config.steps, config.ahead), name.startswith("ours")
        )
        for name, client in clients.items()
    ]
    title = (
        f"forward_backward and optim_step, {DATUMS} x {DATUM_TOKENS} tokens, {config.steps} steps, {config.ahead} ahead"
    )
    results = [*measure(contenders, config), *missing]
    report.add_comparison(f"{title}: tokens per second", results, per_token=True)
    rates = [
        [result.name, number(config.steps / result.seconds.median)] for result in results if result.status == "measured"
    ]
    report.tables.append(Table("The same in steps", ["contender", "steps/s"], rates))


def train(client: Any, data: list[tinker.Datum], steps: int, ahead: int) -> int:
    """Run the steps, with `ahead` of them submitted before waiting for the oldest. Returns the number of tokens."""
    waiting: list[tuple[Any, Any]] = []
    for _ in range(steps):
        forward_backward = client.forward_backward(data, "cross_entropy")
        waiting.append((forward_backward, client.optim_step(tinker.AdamParams(learning_rate=1e-4))))
        if len(waiting) == ahead:
            _finish_step(*waiting.pop(0))
    for step in waiting:
        _finish_step(*step)
    return steps * len(data) * DATUM_TOKENS


def _finish_step(forward_backward: Any, optim_step: Any) -> None:
    output = forward_backward.result()
    if len(output.loss_fn_outputs) != DATUMS:
        raise AssertionError(f"{len(output.loss_fn_outputs)} outputs for {DATUMS} datums")
    optim_step.result()


def datum(tokens: list[int]) -> tinker.Datum:
    """Cross-entropy of each token except the first."""
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, dtype=np.float32)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def _compare_sampling(report: Report, config: Config, samplers: dict[str, Any]) -> None:
    vocabulary = SHAPES[config.shape].vocab
    contenders = [
        Contender(
            name,
            lambda n, client=client: sum(
                sample(client, vocabulary, n * config.sampling_rounds + i) for i in range(config.sampling_rounds)
            ),
            name.startswith("ours"),
        )
        for name, client in samplers.items()
    ]
    title = f"{REQUESTS} requests x {SAMPLES} samples x {SAMPLE_TOKENS} tokens, {config.sampling_rounds} times"
    report.add_comparison(f"{title}: tokens per second", measure(contenders, config), per_token=True)


def sample(client: Any, vocabulary: int, seed: int) -> int:
    """Requests with different prompts, all submitted before waiting for the first. Returns the number of tokens."""
    params = tinker.SamplingParams(max_tokens=SAMPLE_TOKENS, stop=[], seed=seed)
    futures = [
        client.sample(tinker.ModelInput.from_ints(random_tokens(vocabulary, 32, 1000 * seed + i)), SAMPLES, params)
        for i in range(REQUESTS)
    ]
    return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)


def _idle(config: Config, server: ServerProcess, client: Any) -> Table:
    """CPU time of the server while many clients wait for a request that cannot run yet."""

    async def hold() -> float:
        limits = httpx.Limits(max_connections=config.pollers + 1)
        headers = {"X-API-Key": KEY}
        async with httpx.AsyncClient(
            base_url=f"{server.url}/api/v1", headers=headers, limits=limits, timeout=60
        ) as web:
            model_id = client.model_id
            far_ahead = {"model_id": model_id, "seq_id": 10**6, "adam_params": {}}
            request_id = (await web.post("/optim_step", json=far_ahead)).json()["request_id"]
            end = time.monotonic() + config.poll_seconds

            async def poll() -> None:
                while (left := end - time.monotonic()) > 0:
                    try:
                        async with asyncio.timeout(left):
                            await web.post("/retrieve_future", json={"request_id": request_id})
                    except TimeoutError:
                        return

            before = server.cpu_seconds()
            await asyncio.gather(*(poll() for _ in range(config.pollers)))
            return (server.cpu_seconds() - before) / config.poll_seconds

    return Table(
        f"{config.pollers} clients that hold long polls",
        ["seconds", "cores used by the server"],
        [[number(config.poll_seconds), number(asyncio.run(hold()))]],
    )


def _crowd(config: Config, server: ServerProcess, client: Any, model: Path) -> Table:
    """Many requests at the same time: how many end, and how long they wait (`/metrics`)."""
    prompt = tinker.ModelInput.from_ints([3, 4, 5])
    start = time.perf_counter()
    futures = [
        client.sample(prompt, 1, tinker.SamplingParams(max_tokens=CROWD_TOKENS, stop=[], seed=seed))
        for seed in range(config.crowd)
    ]
    ended = sum(len(future.result().sequences[0].tokens) == CROWD_TOKENS for future in futures)
    seconds = time.perf_counter() - start
    name = 'tinker_sampling_wait_seconds{{model="{}",quantile="{}"}}'
    waits = [server.metric(name.format(model, quantile)) for quantile in ("0.5", "0.99")]
    return Table(
        f"{config.crowd} sampling requests at the same time",
        ["made", "ended", "seconds", "wait for the first token since the start, median", "p99"],
        [[str(config.crowd), str(ended), number(seconds), *(f"{number(wait)} s" for wait in waits)]],
    )


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
