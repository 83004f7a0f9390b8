"""Re-exports utils/files.py, for scripts that import this path."""

from tinker_cookbook.utils.files import read_jsonl

__all__ = ["read_jsonl"]
