"""Writes the 60 shipped programming problems deterministically (`python -m tools.code_problems`)."""
