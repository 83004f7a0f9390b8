"""Learning from comparisons: DPO, preference models, and rewards from them. Names are imported lazily, on first access."""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "types": "Comparison LabeledComparison PreferenceModel PreferenceModelBuilder",
        "preference_datasets": "ChatDatasetBuilderFromComparisons ComparisonBuilderFromJsonl ComparisonDatasetBuilder",
    },
)
