"""One session on a GPU: correctness, speed, and a report that survives an interruption. See docs/gpu.md."""
