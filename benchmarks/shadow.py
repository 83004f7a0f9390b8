"""What the shadow of gradient_intuition costs: CPU seconds per reply, and those of sampling the reply and of training on it.

    OMP_NUM_THREADS=1 python -m benchmarks.shadow
    OMP_NUM_THREADS=1 python -m benchmarks.shadow prompt=600 answer=100 group=16

Groups of different answers to one prompt; for each, sampling, training and the shadow are timed in turn. The figures are
medians over the groups of `time.process_time`, which other programs on the machine do not lengthen.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import chz
import tinker

from benchmarks.config import run_benchmark
from benchmarks.workload import random_tokens
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.env.shipped.model_aware.shadow import Shadow, answer_datum
from tinker_cookbook.rl.run_clients import RunClients
from tinker_local_backend import ServiceClient
from tinker_local_backend.shipped import default_model, shipped_model

PROBE = 20
"""Tokens of a probe, without the four of its answer."""


@chz.chz(typecheck=True)
class ShadowConfig:
    """Keys of `python -m benchmarks.shadow`."""

    model: str = chz.field(
        default_factory=default_model,
        munger=lambda self, name: shipped_model(name),
        doc="directory or hub id; default: TINKER_DEBATE_BASE_MODEL, else tiny_chat",
    )
    prompt: int = chz.field(default=150, doc="tokens of a prompt", validator=chz.validators.gt(0))
    answer: int = chz.field(default=30, doc="tokens of an answer", validator=chz.validators.gt(0))
    group: int = chz.field(default=8, doc="answers to a prompt", validator=chz.validators.gt(0))
    groups: int = chz.field(default=7, doc="groups that are measured", validator=chz.validators.gt(0))


def measure(config: ShadowConfig, service: ServiceClient) -> dict[str, float]:
    """CPU seconds per reply: `sampled`, `trained` on, and `shadow`."""
    main = service.create_lora_training_client(config.model, rank=32, seed=0).result()
    snapshot = main.save_weights_and_get_sampling_client().result()
    shadow = Shadow(RunClients(TinkerTokenCompleter(snapshot, config.answer), snapshot, service, main))  # type: ignore[arg-type]
    vocabulary = len(main.get_tokenizer())
    probe = answer_datum(random_tokens(vocabulary, PROBE, 1), random_tokens(vocabulary, 4, 2))
    params = tinker.SamplingParams(max_tokens=config.answer, temperature=1.0, seed=0, stop=[])
    seconds: dict[str, list[float]] = {"sampled": [], "trained": [], "shadow": []}
    for number in range(config.groups + 1):  # the first group warms up, and saves the state
        prompt = random_tokens(vocabulary, config.prompt, 10 + number)
        answers = [random_tokens(vocabulary, config.answer, 1000 * number + i) for i in range(config.group)]
        steps = [answer_datum(prompt, answer) for answer in answers]
        work: dict[str, Callable[[], object]] = {
            "sampled": lambda: snapshot.sample(tinker.ModelInput.from_ints(prompt), config.group, params).result(),  # noqa: B023
            "trained": lambda: main.forward_backward(steps, "cross_entropy").result(),  # noqa: B023
            "shadow": lambda: asyncio.run(shadow.changes(snapshot, steps, probe, 1e-4)),  # noqa: B023
        }
        for name, play in work.items():
            started = time.process_time()
            play()
            seconds[name].append((time.process_time() - started) / config.group)
    return {name: median(values[1:]) for name, values in seconds.items()}


def main(config: ShadowConfig) -> None:
    with tempfile.TemporaryDirectory(prefix="shadow-") as home, ServiceClient(home=Path(home)) as service:
        seconds = measure(config, service)
    print(f"{config.group} answers of {config.answer} tokens to prompts of {config.prompt}, CPU seconds per reply:")
    for name, value in seconds.items():
        print(f"{name:8} {value:.4f}")
    share = seconds["shadow"] / (seconds["sampled"] + seconds["trained"])
    print(f"the shadow costs {share:.1f} times what sampling the reply and training on it do")


if __name__ == "__main__":
    run_benchmark(main)
