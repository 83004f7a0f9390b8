"""Run inspect-ai tasks on a base model or a checkpoint in one call; the command `recipes.eval_inspect` also prints a
table.

asyncio.run(main(Config(tasks=["qa/arithmetic", "inspect_evals/gsm8k"], model_path="tinker://<run>/sampler_weights/final")))
"""

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.eval.inspect_evaluators import InspectEvaluator, InspectEvaluatorBuilder, require_inspect
from tinker_cookbook.field_groups import CheckpointKey
from tinker_cookbook.weights_config import WeightsConfig


@chz.chz(typecheck=True)
class Config(CheckpointKey, InspectEvaluatorBuilder):
    """What to evaluate. The renderer is the configured one, else the checkpoint's, else the model's default."""


async def main(config: Config) -> dict[str, float]:
    """Run the tasks; the metrics are printed and returned.

    Raises:
        ConfigurationError: inspect-ai is not installed, neither weights nor a base model are named, or the checkpoint
            belongs to a base model other than model_name.
    """
    require_inspect()
    weights = WeightsConfig(
        base_model=config.model_name, load_checkpoint_path=config.model_path, renderer_name=config.renderer_name
    )
    policy = await weights.open_policy("model_path" if config.model_path is not None else "model_name")
    resolved = chz.replace(config, model_name=policy.base_model, renderer_name=policy.renderer_name)
    metrics = await InspectEvaluator(resolved)(policy.sampling_client)
    for name, value in metrics.items():
        print(f"{name}: {value:g}")
    return metrics


if __name__ == "__main__":
    run_recipe(Config, main)
