"""Time of one tenant's step on a server that another tenant floods with requests.

python -m benchmarks.fairness
"""

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker

from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.models import SHAPES, ensure_model
from benchmarks.report import Report, Table, finish, number
from benchmarks.server import datum, sample, train
from benchmarks.serving import FLOOD_KEY, KEY, ServerProcess, our_server
from benchmarks.workload import random_tokens

DATUMS, DATUM_TOKENS = 8, 64
"""Training data of the honest tenant's step, after 8 requests x 4 samples x 64 tokens."""

SAMPLES, SAMPLE_TOKENS = 512, 1000
LONG_TOKENS = 2000


@chz.chz(typecheck=True)
class Config(CommonConfig):
    """Keys of `python -m benchmarks.fairness`."""

    # client and HTTP need the other core
    threads: int = chz.field(default=1, doc="CPU threads of every contender", validator=chz.validators.gt(0))
    steps: int = chz.field(
        default=9, doc="steps alone and under each flood, for the median", validator=chz.validators.gt(0)
    )
    outstanding: int = chz.field(default=4, doc="outstanding requests of the flood", validator=chz.validators.gt(0))


Ask = Callable[[int], Sequence[Any]]
"""(number) -> the futures of the requests with that number, after submitting them."""

Flood = Callable[[tinker.ServiceClient], Ask]


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    shape = SHAPES[config.shape]
    with environment(config), tempfile.TemporaryDirectory(prefix="tinker-benchmark-") as home:
        report = Report.start("fairness", config)
        model = ensure_model(config.shape, shape, config.models_dir)
        with our_server(model, Path(home), config.threads) as server:
            step = _honest(config, server, model)
            step(0)
            times = {"alone": _seconds(step, config.steps, 1)}
            for index, (name, flood) in enumerate(_floods(config, model).items()):
                with _flooded(server, flood, config.outstanding):
                    step(10_000 * (index + 1))  # warm-up, until the flood has begun
                    times[name] = _seconds(step, config.steps, 10_000 * (index + 1) + 1)
    alone = float(np.median(times["alone"]))
    rows = [
        [name, *(f"{number(f(seconds))} s" for f in (np.median, min, max)), number(float(np.median(seconds)) / alone)]
        for name, seconds in times.items()
    ]
    step = f"8 x 4 samples of 64 tokens, then a training step on {DATUMS} x {DATUM_TOKENS}"
    title = f"{step}, beside {config.outstanding} of another tenant's at a time"
    report.tables.append(Table(title, ["flood", "median", "least", "most", "to alone"], rows))
    return report


def _seconds(step: Callable[[int], float], count: int, first: int) -> list[float]:
    return [step(first + i) for i in range(count)]


def _honest(config: Config, server: ServerProcess, model: Path) -> Callable[[int], float]:
    """A function that runs a step with a seed and returns its seconds."""
    vocabulary = SHAPES[config.shape].vocab
    sdk = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = sdk.create_lora_training_client(str(model), rank=config.rank, seed=0).result()
    sampler = sdk.create_sampling_client(base_model=str(model)).result()
    data = [datum(random_tokens(vocabulary, DATUM_TOKENS + 1, seed)) for seed in range(DATUMS)]

    def step(seed: int) -> float:
        start = time.perf_counter()
        sample(sampler, vocabulary, seed)
        train(training, data, steps=1, ahead=1)
        return time.perf_counter() - start

    return step


def _floods(config: Config, model: Path) -> dict[str, Flood]:
    vocabulary = SHAPES[config.shape].vocab
    long = tinker.SamplingParams(max_tokens=SAMPLE_TOKENS, stop=[])
    short = tinker.SamplingParams(max_tokens=1, stop=[])

    def prompt(seed: int, tokens: int = LONG_TOKENS) -> tinker.ModelInput:
        return tinker.ModelInput.from_ints(random_tokens(vocabulary, tokens, seed))

    def samples(sdk: tinker.ServiceClient) -> Ask:
        sampler = sdk.create_sampling_client(base_model=str(model)).result()
        return lambda n: [sampler.sample(prompt(n, 4), SAMPLES, long)]

    def prompts(sdk: tinker.ServiceClient) -> Ask:
        sampler = sdk.create_sampling_client(base_model=str(model)).result()
        return lambda n: [sampler.sample(prompt(8 * n + i), 1, short) for i in range(8)]

    def scored(sdk: tinker.ServiceClient) -> Ask:
        sampler = sdk.create_sampling_client(base_model=str(model)).result()
        return lambda n: [sampler.compute_logprobs(prompt(8 * n + i)) for i in range(8)]

    def training(sdk: tinker.ServiceClient) -> Ask:
        client = sdk.create_lora_training_client(str(model), rank=config.rank, seed=1).result()
        batch = [datum(random_tokens(vocabulary, LONG_TOKENS + 1, seed)) for seed in range(8)]
        return lambda _: [client.forward_backward(batch, "cross_entropy")]

    return {
        f"{SAMPLES} samples of {SAMPLE_TOKENS} tokens": samples,
        f"8 prompts of {LONG_TOKENS} tokens": prompts,
        f"8 scored prompts of {LONG_TOKENS} tokens": scored,
        f"forward_backward of 8 x {LONG_TOKENS} tokens": training,
    }


@contextmanager
def _flooded(server: ServerProcess, flood: Flood, outstanding: int) -> Iterator[None]:
    """Keep `outstanding` requests of the other tenant in flight inside the context."""
    sdk = tinker.ServiceClient(base_url=server.url, api_key=FLOOD_KEY)
    ask = flood(sdk)
    ended = threading.Event()

    def keep_asking() -> None:
        waiting: deque[Sequence[Any]] = deque()
        count = 0
        while not ended.is_set():
            while len(waiting) < outstanding:
                waiting.append(ask(count))
                count += 1
            if all(future.future().done() for future in waiting[0]):
                waiting.popleft()
            else:
                ended.wait(0.01)

    thread = threading.Thread(target=keep_asking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sdk.close("success").result()  # drops outstanding requests


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
