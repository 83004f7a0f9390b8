"""Show the examples of a conversation dataset on the terminal, coloured by their weights.

python -m tinker_cookbook.supervised.viz_sft_dataset dataset_path=package.module:MyBuilder model_name=Qwen/Qwen3-8B
"""

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import ModelKey, RendererKey
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers.datum_text import colorize_example
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, ConversationKeys, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.fields import docs, fill
from tinker_cookbook.utils.misc_utils import lookup_func

EXAMPLES = 100
DATASETS = "tinker_cookbook.recipes.chat_sl.chat_datasets"
"""Module of a builder that is given by its name alone."""


@chz.chz
class Config(
    ModelKey, RendererKey, ConversationKeys, model_name="meta-llama/Llama-3.1-8B", max_length=None, batch_size=EXAMPLES
):
    """The dataset to show, and how it is rendered."""

    DOCS = docs(
        model_name="model whose tokenizer is used",
        renderer_name="how messages become tokens; None: the model's own",
        batch_size="how many examples are shown",
    )

    dataset_path: str = chz.field(
        default="Tulu3Builder", doc="package.module:Builder, or a builder's name among the recipes' datasets"
    )


def run(cfg: Config) -> None:
    """Show the first examples, one per press of Enter; Ctrl-D quits.

    Raises:
        ConfigurationError: `dataset_path` does not name a builder of a conversation dataset.
    """
    common = fill(
        ChatDatasetBuilderCommonConfig,
        cfg,
        model_name_for_tokenizer=cfg.model_name,
        renderer_name=cfg.renderer_name or model_info.get_recommended_renderer_name(cfg.model_name),
    )
    try:
        builder = lookup_func(cfg.dataset_path, default_module=DATASETS)(common_config=common)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"dataset_path={cfg.dataset_path!r}: {error}; give package.module:Builder") from error
    if not isinstance(builder, SupervisedDatasetBuilder):
        raise ConfigurationError(
            f"dataset_path={cfg.dataset_path!r}: makes a {type(builder).__name__}, not a dataset builder"
        )
    tokenizer = get_tokenizer(cfg.model_name)
    dataset, _ = builder()
    for datum in dataset.get_batch(0):
        print(colorize_example(datum, tokenizer))
        try:
            input("Enter for the next one ")
        except EOFError:
            return


if __name__ == "__main__":
    run_recipe(Config, run)
