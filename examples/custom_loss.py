"""A custom loss: unlikelihood training, which makes given replies less likely.

`forward_backward_custom` passes the logprobs of each datum's targets as tensors with gradients; any differentiable function of
them is a loss. Here it is -log(1 - p) per token (Welleck et al. 2020) for replies to unlearn and -log p for replies to
keep. Run from the repository's root:

    python -m examples.custom_loss
"""

import asyncio

import tinker
import torch

from tinker_cookbook import backends
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, RENDERER = "example_data/tiny_chat", "qwen3_instruct"
KEEP, UNLEARN = ("What is 2 + 2?", "4"), ("What is 3 + 3?", "6")


def make_datum(question: str, answer: str) -> tinker.Datum:
    renderer = get_renderer(RENDERER, get_tokenizer(MODEL), model_name=MODEL)
    conversation: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return datum_from_model_input_weights(*renderer.build_supervised_example(conversation))


def unlikelihood(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Keeps data[0] and unlearns data[1]. logprobs: one float32 (N,) per datum. Returns the loss (a scalar) and metrics."""
    kept, unlearned = (
        values[torch.tensor(datum.loss_fn_inputs["weights"].tolist()) > 0]
        for datum, values in zip(data, logprobs, strict=True)
    )
    # log(1 - exp(lp)), clamped so that it stays finite when the model is almost sure.
    less_likely = torch.log(-torch.expm1(unlearned.clamp(max=-1e-6)))
    loss = -kept.sum() - less_likely.sum()
    return loss, {"kept": float(kept.detach().exp().mean()), "unlearned": float(unlearned.detach().exp().mean())}


async def main(steps: int = 10) -> list[dict[str, float]]:
    """Train and return the metrics of each step: the mean token probability of the kept and of the unlearned reply."""
    service = backends.create_service_client("local")
    client = await service.create_lora_training_client(MODEL, rank=8, seed=0)
    data = [make_datum(*KEEP), make_datum(*UNLEARN)]
    history = []
    for _ in range(steps):
        passed = client.forward_backward_custom(data, unlikelihood)
        updated = client.optim_step(tinker.AdamParams(learning_rate=2e-3))
        metrics = (await passed).metrics
        await updated
        history.append({key: metrics[key] for key in ("kept", "unlearned")})
        print("  ".join(f"{key}={value:.4f}" for key, value in history[-1].items()))
    return history


if __name__ == "__main__":
    backends.check_command()
    asyncio.run(main())
