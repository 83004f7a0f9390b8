"""Speed and memory of the local engine, compared with alternative tools. See benchmarks/README.md."""
