"""Supervised fine-tuning: datasets, datums, and the loop. Names are imported lazily, on first access."""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "types": "ChatDatasetBuilder ChatDatasetBuilderCommonConfig SupervisedDataset SupervisedDatasetBuilder",
        "data": "FromConversationFileBuilder HFDatasetSource InterleavedChatDatasetBuilder "
        "StreamingSupervisedDatasetFromHFDataset SupervisedDatasetFromHFDataset conversation_to_datum",
        "common": "compute_bpb compute_mean_nll datum_from_model_input_weights datum_from_tokens_weights",
    },
)
