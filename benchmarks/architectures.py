"""How the engine supports each decoder-only architecture: trains, samples only, or refuses it. Writes docs/models.md.

    python -m benchmarks.architectures
    python -m benchmarks.architectures only=granite,gemma2 page=

Each is a random model of a few thousand parameters. Sampled logprobs are compared with those of plain transformers in float64 on
the same tokens, one sequence at a time; the trainer's logprobs and the gradients of all adapter matrices with those of PEFT after
loading the adapter that the engine saved.
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from benchmarks.architecture_configs import ARCHITECTURES, make_config
from benchmarks.architecture_parts import VOCABULARY
from benchmarks.config import EXAMPLE_MODEL, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.gpu.models import fill_adapter
from benchmarks.workload import random_tokens
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_local_backend import ModelLoadError, RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.expert_matrices import to_peft
from tinker_local_backend.engine.model.loading import auto_class
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.storage.paths import CheckpointPath

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
MARK = "<!-- what follows is written by python -m benchmarks.architectures -->"
RANK = 4
LARGEST_DIFFERENCE = 1e-3
"""Accepted as rounding: difference of a logprob, or of a gradient relative to its matrix's largest entry."""

FLOAT32_ONLY = ("xglm", "inkling2_text")
"""Model types that transformers cannot compute in float64."""

TRAINS, IN_PART, SAMPLES, REFUSED, WRONG = "trains", "trains in part", "samples only", "refused", "WRONG"


@chz.chz(typecheck=True)
class ArchitecturesConfig:
    """Keys of `python -m benchmarks.architectures`."""

    only: list[str] | None = chz.field(default=None, doc="model types, separated by commas; default: all")
    page: str = chz.field(default=str(PAGE), doc="Markdown file whose table is rewritten; empty: only print")


@dataclass
class Finding:
    """The result for one architecture. Differences are maxima; None if there is nothing to compare."""

    model_type: str
    verdict: str = REFUSED
    reason: str = ""
    sampled: float | None = None
    trained: float | None = None
    gradient: float | None = None

    def row(self) -> list[str]:
        differences = (self.sampled, self.trained, self.gradient)
        return [
            f"`{self.model_type}`",
            self.verdict,
            *("" if d is None else f"{d:.0e}" for d in differences),
            self.reason,
        ]


def write_model(model_type: str, folder: Path) -> Any:
    """Write a random model with the shipped tokenizer to a folder. Returns transformers' model in float64.

    Norms and biases are random too: with their usual initial values, leaving one out would change nothing.
    """
    config, generator = make_config(model_type), torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (0.5 if "embed" in name or "wte" in name else 0.2))
            elif any(part in name for part in ("bias", "norm", "ln_", "sinks")):
                parameter += 0.3 * noise
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return load_plain(folder)


def copy_tokenizer(folder: Path) -> None:
    """Copy the shipped tokenizer to a folder."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(EXAMPLE_MODEL) / name, folder)


def load_plain(folder: Path) -> Any:
    """transformers' model, in float64 if it supports that."""
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if config.model_type in FLOAT32_ONLY else torch.float64
    return (
        auto_class(config)
        .from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )


def check(model_type: str, folder: Path) -> Finding:
    """Check one architecture, in an empty folder."""
    plain = write_model(model_type, folder / "model")
    finding = Finding(model_type)
    with ServiceClient(home=folder / "home") as service:
        try:
            sampler = service.create_sampling_client(base_model=str(folder / "model")).result()
        except ModelLoadError as refusal:
            finding.reason = _reason(refusal)
            return finding
        finding.verdict = SAMPLES
        finding.sampled = _sampled_difference(sampler, plain)
        try:
            client = _training_client(service, str(folder / "model"), "shared_outer")
        except ModelLoadError as refusal:
            finding.reason = _reason(refusal)
        else:
            finding.verdict, targets = TRAINS, client._run.model.targets
            if client._run.model.experts and not targets.experts("shared_outer"):
                finding.verdict = IN_PART
                finding.reason = "all but routed experts" if targets.has_mlp_linears else "attention and head"
            finding.trained, finding.gradient, lost = _training_differences(client, folder)
            if targets.experts("per_expert"):
                client = _training_client(service, str(folder / "model"), "per_expert")
                trained, gradient, more = _training_differences(client, folder)
                finding.trained, finding.gradient = max(finding.trained, trained), max(finding.gradient, gradient)
                lost = sorted({*lost, *more})
            if lost:
                finding.reason += f"{'; ' if finding.reason else ''}PEFT does not load {', '.join(lost)}"
    differences = [d for d in (finding.sampled, finding.trained, finding.gradient) if d is not None]
    if not max(differences) <= LARGEST_DIFFERENCE:
        finding.verdict = WRONG
    return finding


def _training_client(service: ServiceClient, path: str, layout: ExpertLayout) -> TrainingClient:
    """A client with an adapter on all modules that can have one, and this layout on routed experts."""
    options: dict[str, Any] = {"rank": RANK, "seed": 0}
    try:
        return service.create_lora_training_client(path, **options, expert_lora=layout).result()
    except RequestError:
        return service.create_lora_training_client(path, **options, train_mlp=False).result()


def _reason(refusal: ModelLoadError) -> str:
    """The refusal without the model's name and type, and without the advice."""
    return str(refusal).partition(") ")[2].partition("; use a dense")[0]


def _ids(count: int, seed: int) -> list[int]:
    return random_tokens(VOCABULARY - 40, count, seed)  # without the special ones at the end


def _plain_logprobs(plain: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logprob of each token but the first, (N - 1,)."""
    ids = torch.tensor([list(tokens)])
    return plain(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def _sampled_difference(sampler: SamplingClient, plain: Any) -> float:
    """Largest difference of logprobs, for prompts longer and shorter than a window, and completions that exceed it."""
    differences = []
    for length, samples in ((21, 2), (3, 3), (40, 1)):
        tokens = _ids(length, seed=length)
        params = tinker.SamplingParams(max_tokens=24, seed=0, stop=[])
        response = sampler.sample(
            tinker.ModelInput.from_ints(tokens), samples, params, include_prompt_logprobs=True
        ).result()
        assert response.prompt_logprobs is not None
        for sequence in response.sequences:
            expected = _plain_logprobs(plain, [*tokens, *sequence.tokens])
            sampled = torch.tensor([*response.prompt_logprobs[1:], *sequence.logprobs], dtype=torch.float64)  # pyright: ignore
            differences.append(float((sampled - expected).abs().max()))
    return max(differences)


def _datums() -> list[tinker.Datum]:
    """Datums of several lengths, two of them with a common prefix that is longer than a window."""
    shared = _ids(20, seed=1)
    sequences = [_ids(2, 2), _ids(24, 3), [*shared, *_ids(9, 4)], [*shared, *_ids(15, 5)]]
    data = []
    for i, tokens in enumerate(sequences):
        weights = np.random.default_rng(i).normal(size=len(tokens) - 1).astype(np.float32)
        inputs = {
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": tinker.TensorData.from_numpy(weights),
        }
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def _load_into_peft(model: Path, adapter: Path) -> tuple[Any, list[str]]:
    """PEFT's model with the adapter, and the linears whose matrices PEFT fails to load by itself.

    transformers renames weights of some models while it loads them, and PEFT renames an adapter's weights in the same way,
    although they already have the model's names.
    """
    plain = load_plain(model)
    peft: Any = PeftModel.from_pretrained(plain, str(adapter), is_trainable=True)
    peft.to(plain.dtype).eval()
    parameters = {name.replace(".default.", "."): parameter for name, parameter in peft.named_parameters()}
    lost = []
    for name, matrix in load_file(adapter / "adapter_model.safetensors").items():
        if not torch.allclose(parameters[name].float(), matrix.float()):
            lost.append(name.rpartition(".lora_")[0].rpartition(".")[2])
            parameters[name].data.copy_(matrix)
    return peft, sorted(set(lost))


def _training_differences(client: TrainingClient, folder: Path) -> tuple[float, float, list[str]]:
    """Largest differences of the trainer's logprobs, and of gradients relative to their matrix's largest entry; and the linears
    that PEFT does not load."""
    state, data = client._run.state, _datums()
    fill_adapter(state.adapter, seed=3, size=0.05)
    output = client.forward_backward(data, "cross_entropy").result()
    saved = CheckpointPath.parse(client.save_weights_for_sampler("for-peft").result().path)
    peft, lost = _load_into_peft(folder / "model", saved.folder(folder / "home"))
    logprobs = []
    for datum, outputs in zip(data, output.loss_fn_outputs, strict=True):
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        tokens = [*datum.model_input.to_ints(), int(targets[-1])]
        expected = _plain_logprobs(peft, tokens)
        weights = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
        (-(weights * expected).sum()).backward()
        logprobs.append(float((torch.from_numpy(outputs["logprobs"].to_numpy()) - expected.detach()).abs().max()))
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in peft.named_parameters()
        if parameter.requires_grad
    }
    assert state.gradients is not None
    theirs.update(_gradients_of_experts(state.adapter, theirs))
    shares = []
    for (name, _), ours in zip(state.adapter.named_parameters(), state.gradients, strict=True):
        expected = theirs.pop(name)
        if (
            expected is None
        ):  # Mamba reads the weight of its dt_proj without calling it: an adapter there changes nothing
            expected = torch.zeros_like(ours, dtype=torch.float64)
        shares.append(float((ours.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12)))
    if theirs:
        raise BenchmarkError(f"PEFT trains matrices that the engine does not: {sorted(theirs)}")
    return max(logprobs), max(shares), lost


def _gradients_of_experts(adapter: Adapter, theirs: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Gradients of the experts' matrices from those of PEFT's tensors, which are removed from `theirs`. PEFT's tensors are a
    linear function of the matrices."""
    leaves = {m.name: (adapter.a[m.name], adapter.b[m.name]) for m in adapter.experts}
    a, b = ({name: pair[i].detach().double().requires_grad_() for name, pair in leaves.items()} for i in (0, 1))
    total = torch.zeros((), dtype=torch.float64)
    for name, stored in to_peft(adapter.experts, (a, b)).items():
        gradient = theirs.pop(name)
        total = total + (0 if gradient is None else (stored * gradient).sum())
    if total.requires_grad:
        total.backward()
    by_factor = zip("AB", (a, b), strict=True)
    return {f"{name}.lora_{factor}.weight": m.grad for factor, table in by_factor for name, m in table.items()}


def table(findings: Sequence[Finding]) -> str:
    """The page's table and its count."""
    head = ["model type", "engine", "sampled logprobs", "trained logprobs", "gradients", "what, or why not"]
    counts = [f"{sum(f.verdict == v for f in findings)} {v}" for v in (TRAINS, IN_PART, SAMPLES, REFUSED, WRONG)]
    return f"Of {len(findings)} architectures: {', '.join(counts)}.\n\n{markdown_table([head, *(f.row() for f in findings)])}\n"


def main(config: ArchitecturesConfig) -> None:
    unknown = set(config.only or ()) - ARCHITECTURES.keys()
    if unknown:
        raise BenchmarkError(f"only: {', '.join(sorted(unknown))} not among {', '.join(ARCHITECTURES)}")
    transformers_logging.disable_progress_bar()
    findings = []
    for model_type in config.only or ARCHITECTURES:
        with tempfile.TemporaryDirectory(prefix="tinker-architecture-") as folder:
            findings.append(check(model_type, Path(folder)))
        print(" | ".join(findings[-1].row()), flush=True)
    if config.page and config.only is None:
        page = Path(config.page)
        text = page.read_text(encoding="utf-8")
        write_text(page, text[: text.index(MARK)] + f"{MARK}\n\n{table(findings)}")
    if any(finding.verdict == WRONG for finding in findings):
        sys.exit(1)


if __name__ == "__main__":
    run_benchmark(main)
