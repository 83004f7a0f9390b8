"""Alternatives to the local engine, each given exactly the same work."""
