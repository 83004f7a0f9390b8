"""Runs that are read, and written, elsewhere than in a folder at hand. Names are imported when they are asked for.

`Storage` is a place for files: a folder, or what fsspec reaches. `TrainingRunStore` reads a run there with the readers that
the run's own folder has, and takes metrics and checkpoints of a loop. `RunRegistry` lists runs. `EvalStore` has evaluations of
checkpoints; `tinker_cookbook.benchmarks` resumes from files of its own.
"""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "storage": "AsyncStorage FsspecStorage LocalStorage Storage StorageStat storage_from_uri storage_join",
        "incremental": "IncrementalReader",
        "training_store": "IterationInfo TrainingRunStore",
        "registry": "RunInfo RunRegistry",
        "eval_store": "EvalStore RunMetadata",
    },
)
