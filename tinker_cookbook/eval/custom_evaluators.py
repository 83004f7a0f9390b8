"""An example evaluator: questions with answers, and a function that grades a reply.

python -m tinker_cookbook.eval.custom_evaluators
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tinker_cookbook import backends
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import get_renderer_of_model, get_text_content
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.utils.lazy import tinker

QA_DATASET = [
    {"input": f"What is the capital of {country}?", "output": capital}
    for country, capital in (("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"))
]
"""Example questions."""
MAX_TOKENS, TEMPERATURE = 100, 0.7


def grader_fn(response: str, target: str) -> bool:
    """Whether the response contains the target, ignoring case."""
    return target.lower() in response.lower()


class CustomEvaluator(SamplingClientEvaluator):
    """Asks every question once; `accuracy` is the fraction of right replies, 0 without questions.

    Args:
        dataset: dicts with `input` (the question) and `output` (passed to the grader).
        grader_fn: takes the reply's text and `output`.
        model_name: the model whose tokenizer to use.
        renderer_name: the renderer of the messages.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, str]],
        grader_fn: Callable[[str, str], bool],
        model_name: str,
        renderer_name: str,
    ) -> None:
        self.dataset, self.grader_fn = dataset, grader_fn
        self.renderer = get_renderer_of_model(renderer_name, model_name)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        params = tinker.SamplingParams(
            max_tokens=MAX_TOKENS, temperature=TEMPERATURE, stop=self.renderer.get_stop_sequences()
        )
        prompts = [
            self.renderer.build_generation_prompt([{"role": "user", "content": row["input"]}]) for row in self.dataset
        ]
        futures = [sampling_client.sample(prompt, 1, params) for prompt in prompts]
        right = 0
        for row, future in zip(self.dataset, futures, strict=True):
            reply, _ = self.renderer.parse_response(list((await future).sequences[0].tokens))
            right += bool(self.grader_fn(get_text_content(reply), row["output"]))
        return {"accuracy": right / len(self.dataset) if self.dataset else 0.0}


async def main() -> None:
    """Evaluate a model of the hosted service, or of the local engine, on QA_DATASET."""
    model_name = "Qwen/Qwen3.5-9B"
    evaluator = CustomEvaluator(QA_DATASET, grader_fn, model_name, model_info.get_recommended_renderer_name(model_name))
    client = await backends.create_service_client().create_sampling_client(base_model=model_name)
    print(await evaluator(client))


if __name__ == "__main__":
    backends.check_command()
    asyncio.run(main())
