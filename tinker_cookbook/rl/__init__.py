"""Reinforcement learning: environments, rollouts, advantages and the training loop. Names are imported lazily, on
first access.
"""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "types": "Action ActionExtra Env EnvGroupBuilder InitialObservationOverflow Logprobs Logs Metrics "
        "Observation RLDataset RLDatasetBuilder RolloutError StepResult StopReason Trajectory "
        "TrajectoryGroup Transition",
        "dataset_utils": "EpochCycledRLDataset cycle_permutation epoch_batch_index",
        "interleaved": "InterleavedRLDatasetBuilder",
        "rollout_strategy": "FailFast MinViableGroup RetryOnFailure RolloutStrategy",
    },
)
