"""Re-exports , for scripts that import this path."""

__all__ = []
