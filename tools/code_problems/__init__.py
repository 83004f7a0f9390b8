"""Writes the 60 shipped programming problems, the same everywhere (`python -m tools.code_problems`)."""
