"""Runs that are read, and written, elsewhere than in a folder at hand. Names are imported when they are asked for.

`Storage` is a place for files: a folder, or what fsspec reaches. `TrainingRunStore` reads a run there with the readers that
the run's own folder has, and takes metrics and checkpoints of a loop. `RunRegistry` lists runs. There is no asynchronous twin
of each method (`asyncio.to_thread` makes one), and no store for evaluations: `tinker_cookbook.benchmarks` resumes from files
that it appends to in its own folder.
"""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "storage": "FsspecStorage LocalStorage Storage StorageStat storage_from_uri storage_join",
        "incremental": "IncrementalReader",
        "training_store": "IterationInfo TrainingRunStore",
        "registry": "RunInfo RunRegistry",
    },
)
