"""What users run today instead of the local engine, each given exactly the same work."""
