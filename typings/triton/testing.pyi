from collections.abc import Callable
from typing import Literal

def do_bench(
    fn: Callable[[], object],
    warmup: int = 25,
    rep: int = 100,
    *,
    return_mode: Literal["min", "max", "mean", "median"] = "mean",
) -> float: ...
def do_bench_cudagraph(
    fn: Callable[[], object], rep: int = 20, *, return_mode: Literal["min", "max", "mean", "median"] = "mean"
) -> float: ...
