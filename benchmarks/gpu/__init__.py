"""One visit to a GPU: what is right, how fast it is, and a report that survives being cut off. See docs/gpu.md."""
