"""Which of the engine's tests run again through the CUDA path with its stand-ins (`make test-kernels`), and why others do not.

TINKER_TEST_EXECUTION=captured python -m pytest tests/engine
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent

CAPTURED = frozenset(
    {
        "test_async",
        "test_bad_input",
        "test_bad_requests",
        "test_checkpoints",
        "test_close",
        "test_custom_loss",
        "test_environment",
        "test_experts",
        "test_families",
        "test_golden_losses",
        "test_isolation",
        "test_kv_budget",
        "test_losses",
        "test_many_clients",
        "test_packing",
        "test_pages",
        "test_peft",
        "test_prompt_scores",
        "test_randomness",
        "test_sampling",
        "test_snapshots",
    }
)
"""Everything that samples, and training through its packed passes."""

NOT_CAPTURED = {
    "test_allowance": "one class on its own; nothing runs on a model",
    "test_check_logprobs": "plants faults in the reference's own choice of tokens",
    "test_continuous_batching": "counts steps of one token each; a burst has eight",
    "test_decode_attention": "the reference's own attention of a decode step",
    "test_determinism": "bits of whole programs, which are a promise of the CPU",
    "test_device_mistakes": "pretends a GPU itself, in one process with the CPU",
    "test_full_disk": "what a disk refuses; samples only to show that a snapshot is as it was",
    "test_kv_memory": "memory of a cache that grows; that of the CUDA path is allocated once",
    "test_llama_like": "the reference's own decoder of Llama-like models on a CPU",
    "test_lockstep": "counts answers within seconds of the clock, of which the stand-ins need more",
    "test_long_soak": "ten thousand requests, minutes on the reference",
    "test_losses_functions": "pure functions of tensors",
    "test_losses_metrics": "diagnostics of losses; samples nothing but what test_losses does",
    "test_many_checkpoints": "storage; the sampler is only opened",
    "test_merge": "folders of merged weights; what it scores, test_prompt_scores scores captured",
    "test_prefix_reuse": "counts steps of one token each; a burst has eight",
    "test_prepared_weights": "weights that the reference lays out for a CPU",
    "test_products": "products of a CPU",
    "test_refused_models": "models that are never run",
    "test_registry": "storage; the sampler is only opened",
    "test_rest_client": "storage; the sampler is only opened",
    "test_run": "storage; the sampler is only opened",
    "test_running": "arrays that the reference keeps between its steps",
    "test_sampling_memory": "memory of the process, which is a promise of the CPU",
    "test_soak": "minutes on the reference",
    "test_trained_layers": "the reference's own layers in training, on a CPU",
    "test_trained_linear": "one autograd function on its own",
    "test_turns": "counts steps of one token each between the parts of a training call",
}
"""Files that sample, or look as if they did, with the reason why the reference is enough."""

_SAMPLES = re.compile(r"\.sample\(|tokens_of\(|Direct\(|Generator\(|sampler|compute_logprobs")


def undecided() -> list[str]:
    """Files that sample and are in neither table, or in both; and names in a table that are no file."""
    files = {path.stem: path.read_text() for path in FOLDER.glob("test_*.py")}
    sampling = {name for name, text in files.items() if _SAMPLES.search(text)}
    listed = [*CAPTURED, *NOT_CAPTURED]
    return sorted((sampling - set(listed)) | (set(listed) - files.keys()) | {n for n in listed if listed.count(n) > 1})
