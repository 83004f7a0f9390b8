"""Speed and memory of the local engine, measured beside the tools that people use instead. See benchmarks/README.md."""
