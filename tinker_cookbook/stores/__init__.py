"""Access to runs that are not in a local folder. Names are imported lazily, on first access.

`Storage` is a place for files: a folder, or anything that fsspec reaches. `TrainingRunStore` reads a run there with
the same readers as a local folder, and accepts a loop's metrics and checkpoints. `RunRegistry` lists runs. `EvalStore`
has evaluations of checkpoints; `eval.benchmarks` resumes from its own files.
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
