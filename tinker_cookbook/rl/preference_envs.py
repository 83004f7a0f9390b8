"""Re-exports preference/envs.py, for scripts that import this path."""

from tinker_cookbook.preference.envs import (
    PairwisePreferenceDataset,
    PairwisePreferenceGroupBuilder,
    PairwisePreferenceRLDatasetBuilder,
    PreferenceEnv,
    Prompt,
    TournamentPattern,
    get_pairs,
    get_pairs_chunked,
)

__all__ = [
    "PairwisePreferenceDataset",
    "PairwisePreferenceGroupBuilder",
    "PairwisePreferenceRLDatasetBuilder",
    "PreferenceEnv",
    "Prompt",
    "TournamentPattern",
    "get_pairs",
    "get_pairs_chunked",
]
